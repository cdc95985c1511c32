"""API of prices and ledger."""

from __future__ import annotations

from typing import Any

from django.urls import path
from rest_framework.parsers import MultiPartParser

from quotas.api.budget_views import BudgetViewSet
from quotas.api.money_views import LedgerViewSet, MonthViewSet, PriceViewSet

router_entries: list[tuple[str, Any, str]] = [
    ("prices", PriceViewSet, "price"),
    ("ledger", LedgerViewSet, "ledger"),
    ("months", MonthViewSet, "month"),
    ("budgets", BudgetViewSet, "budget"),
]
urlpatterns_v1: list[Any] = [
    path(
        "prices/import/",
        PriceViewSet.as_view({"post": "take_file"}, parser_classes=[MultiPartParser]),
        name="prices-import",
    ),
    path("ledger/<uuid:uid>/corrections/", LedgerViewSet.as_view({"post": "correct"}), name="ledger-correct"),
    path("months/<str:month>/close/", MonthViewSet.as_view({"post": "close"}), name="month-close"),
]
