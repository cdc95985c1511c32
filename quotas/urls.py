"""Pages of this room."""

from __future__ import annotations

from typing import Any

from django.urls import path

from quotas.web import (
    views_approvals,
    views_delegations,
    views_home,
    views_limits,
    views_policy,
    views_preview,
    views_quotas,
    views_request_detail,
    views_requests,
)
from quotas.web.money.urls import urlpatterns as money_urlpatterns

app_name = "quotas"
urlpatterns: list[Any] = [
    path("home/", views_home.home, name="home"),
    path("requests/", views_requests.request_list, name="request-list"),
    path("requests/new/", views_requests.request_new, name="request-new"),
    path("requests/fit/", views_requests.request_fit, name="request-fit"),
    path("requests/<uuid:uid>/", views_request_detail.request_detail, name="request-detail"),
    path("requests/<uuid:uid>/edit/", views_requests.request_edit, name="request-edit"),
    path("requests/<uuid:uid>/do/<slug:act>/", views_request_detail.request_act, name="request-act"),
    path("approvals/", views_approvals.approvals, name="approvals"),
    path("approvals/bulk/", views_approvals.approvals_bulk, name="approvals-bulk"),
    path("approvals/delegations/", views_delegations.delegations, name="delegations"),
    path("approvals/delegations/<uuid:uid>/end/", views_delegations.delegation_end, name="delegation-end"),
    path("approvals/<uuid:uid>/", views_approvals.approval_detail, name="approval-detail"),
    path("approvals/<uuid:uid>/preview/", views_preview.approval_preview, name="approval-preview"),
    path("approvals/<uuid:uid>/decide/", views_approvals.approval_decide, name="approval-decide"),
    path("quotas/", views_quotas.quota_tree, name="quota-tree"),
    path("quotas/what-if/", views_quotas.quota_what_if, name="quota-what-if"),
    path("quotas/save/", views_quotas.quota_save, name="quota-save"),
    path("quotas/limits/", views_limits.user_limits, name="user-limits"),
    path("quotas/import/", views_quotas.quota_import, name="quota-import"),
    path("quotas/changes/", views_quotas.quota_change_list, name="quota-changes"),
    path("quotas/changes/new/", views_quotas.quota_change_new, name="quota-change-new"),
    path("quotas/changes/<uuid:uid>/", views_quotas.quota_change, name="quota-change"),
    path("quotas/changes/<uuid:uid>/do/<slug:act>/", views_quotas.quota_change_act, name="quota-change-act"),
    path("policy/", views_policy.approval_policy, name="policy"),
    path("policy/priority/", views_policy.ask_rule_save, name="ask-rule"),
    *money_urlpatterns,
]
