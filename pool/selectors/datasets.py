"""Data sets as people may see them."""

from __future__ import annotations

from django.db.models import Count, Q, QuerySet

from pool.models import Dataset
from portal.accounts.policy import Policy


def datasets_visible(policy: Policy) -> QuerySet[Dataset]:
    """Those of nobody in particular, and those of departments that the person asks for or reads."""
    rows = Dataset.objects.select_related("site", "department").annotate(nodes=Count("cached_on"))
    if not policy.administers_pool:
        rows = rows.filter(Q(department=None) | (policy.asks_for | policy.reads).q("department"))
    return rows.order_by("code")
