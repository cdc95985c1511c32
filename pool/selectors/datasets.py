"""Data sets as people may see them."""

from __future__ import annotations

from django.db.models import Count, Q, QuerySet

from pool.models import Dataset, Node
from portal.accounts.policy import Policy


def datasets_visible(policy: Policy) -> QuerySet[Dataset]:
    """Those of nobody in particular, and those of departments that the person asks for or reads."""
    rows = Dataset.objects.select_related("site", "department").annotate(nodes=Count("cached_on"))
    if not policy.administers_pool:
        rows = rows.filter(Q(department=None) | (policy.asks_for | policy.reads).q("department"))
    return rows.order_by("code")


def datasets_of_node(policy: Policy, node: Node) -> list[str]:
    """Codes of what a node has: cached on it, or on the storage of its site."""
    here = Q(cached_on=node) | Q(site_id=node.cluster.site_id)
    rows = datasets_visible(policy).filter(here, retired_at=None)
    return sorted(set(rows.values_list("code", flat=True)))
