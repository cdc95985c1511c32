"""What the scheduler learns from the site's own history: which kinds of work arrive, and who used how much lately.
Read once an hour, never in a cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Sum

from pool.engine.mix import class_of, with_prior
from pool.engine.model import FlavourFacts, Mix, Request, TaskClass
from quotas.models import CapacityRequest

MIX_OVER = timedelta(days=14)
HALF_LIFE = timedelta(days=7)
USE_OVER = timedelta(days=35)
COLUMNS = (
    "shape", "flavour__code", "options", "gpus_per_node", "fraction_milli", "fraction_mib", "cpu_milli", "requirement",
)  # fmt: skip
NEVER_ASKED = (
    CapacityRequest.State.DRAFT,
    CapacityRequest.State.IN_APPROVAL,
    CapacityRequest.State.RETURNED,
    CapacityRequest.State.NEEDS_CONSENT,
    CapacityRequest.State.REJECTED,
)
USE = """
SELECT user_id, sum(charge_milli * extract(epoch FROM least(coalesce(ended_at, %(at)s), %(at)s)
                                                     - greatest(started_at, %(since)s)) / 3600
                    * power(0.5, extract(epoch FROM %(at)s - least(coalesce(ended_at, %(at)s), %(at)s)) / %(half)s))
  FROM quotas_usagespan
 WHERE started_at < %(at)s AND (ended_at IS NULL OR ended_at > %(since)s)
 GROUP BY user_id
"""


def mix_learn(facts: Iterable[FlavourFacts], at: datetime) -> Mix:
    """The arrivals of the last two weeks by class, whatever became of them; one query, grouped."""
    known = {one.code: one for one in facts}
    rows = (
        CapacityRequest.objects.filter(queued_at__gt=at - MIX_OVER, queued_at__lte=at)
        .exclude(state__in=NEVER_ASKED)
        .order_by()
        .values_list(*COLUMNS)
        .annotate(n=Sum("nodes"))
    )
    counts: Counter[TaskClass] = Counter()
    for shape, code, options, per_node, milli, mib, cpu, requirement, count in rows:
        fraction = shape == CapacityRequest.Shape.FRACTION
        request = Request(
            id=0,
            department_id=0,
            flavours=(code,) if code else tuple(options or ()),
            shape=shape,
            per_node=per_node,
            milli=(milli or 0) if fraction else 0,
            share_mib=(mib or 0) if fraction else 0,
            cpu_milli=cpu,
            min_gpu_mib=int((requirement or {}).get("memory_mib") or 0),
            nvlink=bool((requirement or {}).get("nvlink")),
            fp8=bool((requirement or {}).get("fp8")),
        )
        one = class_of(request, known)
        if one is not None:
            counts[one] += count
    return with_prior(counts)


def use_by_person(at: datetime) -> dict[int, int]:
    """Milli-GPU-hours that each person held lately; what ended counts half for each week since."""
    values: dict[str, Any] = {"at": at, "since": at - USE_OVER, "half": HALF_LIFE.total_seconds()}
    with connection.cursor() as cursor:
        cursor.execute(USE, values)
        return {user_id: round(amount) for user_id, amount in cursor.fetchall() if amount and amount >= 0.5}
