"""What this room exposes under /api/v1/."""

from __future__ import annotations

from typing import Any

from quotas.api import money_urls
from quotas.api.approval_views import ApprovalViewSet, DelegationViewSet, PolicyViewSet, UserLimitViewSet
from quotas.api.ask_rule_views import AskRuleViewSet
from quotas.api.quota_views import QuotaChangeViewSet, QuotaViewSet
from quotas.api.request_views import FlavourViewSet, RequestViewSet

router_entries: list[tuple[str, Any, str]] = [
    ("requests", RequestViewSet, "request"),
    ("approvals", ApprovalViewSet, "approval"),
    ("delegations", DelegationViewSet, "delegation"),
    ("approval-policy", PolicyViewSet, "approval-policy"),
    ("ask-rules", AskRuleViewSet, "ask-rule"),
    ("user-limits", UserLimitViewSet, "user-limit"),
    ("quotas", QuotaViewSet, "quota"),
    ("quota-changes", QuotaChangeViewSet, "quota-change"),
    ("flavours", FlavourViewSet, "flavour"),
    *money_urls.router_entries,
]
urlpatterns_v1: list[Any] = [*money_urls.urlpatterns_v1]
