"""Addresses of the finance pages, in the namespace of quotas."""

from __future__ import annotations

from typing import Any

from django.urls import path

from quotas.web.money import budgets, close, home, ledger, month, prices

urlpatterns: list[Any] = [
    path("finance/", home.finance_home, name="finance-home"),
    path("months/", month.month, name="month"),
    path("months/file/", month.month_file, name="month-file"),
    path("months/close/", close.month_close_page, name="month-close"),
    path("ledger/", ledger.ledger, name="ledger"),
    path("ledger/file/", ledger.ledger_file, name="ledger-file"),
    path("ledger/<uuid:uid>/", ledger.entry, name="ledger-entry"),
    path("budgets/", budgets.budgets, name="budgets"),
    path("budgets/<uuid:uid>/end/", budgets.budget_end_view, name="budget-end"),
    path("prices/", prices.prices, name="prices"),
    path("prices/file/", prices.prices_file, name="prices-file"),
]
