"""Departments' quotas as limits in outside systems: what they should be there, the difference, the push.

The pool decides by its own quotas; a limit over there is a second fence for work that does not come through the pool.
It is the hard cap where one is set, else guarantee and borrow limit together, in whole cards (rounded up, so that it
never forbids what the pool allowed); None: no limit.
"""

from __future__ import annotations

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from pool.executors.base import LIMITS, Limit, polled_executor
from pool.models import Cluster
from pool.services.nodes import require_pool_admin
from portal.kernel.clock import now
from portal.kernel.errors import Conflict
from portal.ops.actor import Actor
from portal.ops.services import audit_record
from quotas.models import QuotaGrant

CARD_MILLI = 1000


def wanted_limits(*, cluster: Cluster) -> dict[str, dict[str, int | None]]:
    """{department code: {flavour code: cards or None}} of the grants in force now, for the cluster's flavours."""
    at = now()
    rows = (
        QuotaGrant.objects.filter(flavour__gpus__node__cluster=cluster, during__contains=at)
        .select_related("department", "flavour")
        .distinct()
    )
    out: dict[str, dict[str, int | None]] = {}
    for row in rows:
        out.setdefault(row.department.code, {})[row.flavour.code] = _cards(row)
    return out


def _cards(grant: QuotaGrant) -> int | None:
    if grant.hard_cap is not None:
        most: int | None = grant.hard_cap
    elif grant.guaranteed is None or grant.borrow_limit is None:
        most = None
    else:
        most = grant.guaranteed + grant.borrow_limit
    return None if most is None else -(-most // CARD_MILLI)


def limits_diff(*, cluster: Cluster) -> list[Limit]:
    """What a push would change; empty where all is in step. Raises the executor's failures."""
    executor = polled_executor(cluster)
    if executor is None or LIMITS not in executor.can:
        return []
    return [item for item in executor.limits(cluster=cluster) if item.there != item.wanted]


def limits_push(*, acting_user: Actor, cluster: Cluster, seen: list[Limit]) -> list[Limit]:
    """Make the limits as they should be, exactly as the diff showed that the administrator saw; Conflict where it is
    another one by now. Returns what was changed."""
    require_pool_admin(acting_user)
    executor = polled_executor(cluster)
    changes = limits_diff(cluster=cluster)
    if executor is None or changes != seen:
        raise Conflict(
            code="limits_changed",
            detail=_(
                "The limits there, or the quotas here, changed meanwhile. Look at the difference again."
            ),
        )
    if changes:
        executor.limits_set(cluster=cluster, limits=changes)
        with transaction.atomic():
            audit_record(
                acting_user=acting_user,
                action="cluster.limits_pushed",
                subject=cluster,
                before={f"{item.scope} {item.resource}": item.there for item in changes},
                after={f"{item.scope} {item.resource}": item.wanted for item in changes},
            )
    return changes
