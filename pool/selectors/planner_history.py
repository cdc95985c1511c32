"""What the scheduler learns from the site's own history: which kinds of work arrive, how long requests
wait, and who used how much lately.
Read once an hour, never in a cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Min, Q, Sum

from pool.engine.mix import class_of, with_prior
from pool.engine.model import FlavourFacts, Mix, Request, TaskClass
from pool.engine.waits import Outlook
from portal.kernel.units import to_ms
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


def outlook_learn(at: datetime) -> Outlook:
    """Arrivals and first starts of the last two weeks, and everybody who waits: what a new one may expect."""
    rows = (
        CapacityRequest.objects.filter(Q(queued_at__gt=at - MIX_OVER) | Q(state=CapacityRequest.State.QUEUED))
        .filter(queued_at__lte=at, shape__in=["whole", "fraction", "mig"])
        .exclude(state__in=NEVER_ASKED)
        .annotate(first=Min("allocations__reserved_at"))
        .order_by()
        .values_list("id", "department_id", "flavour__code", "options", "charge_milli", "queued_at", "first", "state",
                     "state_since")
    )  # fmt: skip
    events: list[tuple[int, int, int, tuple[int, str], int]] = []
    for pk, department_id, code, options, milli, queued_at, first, state, state_since in rows:
        line = (department_id, code or next(iter(options or ()), ""))
        if queued_at is None:
            continue
        began = to_ms(queued_at)
        events.append((began, 0, pk, line, milli))
        if first is not None:
            events.append((max(began, to_ms(first)), 1, pk, line, milli))
        elif state != CapacityRequest.State.QUEUED:
            events.append((max(began, to_ms(state_since)), 2, pk, line, milli))
    outlook = Outlook()
    for moment, kind, pk, line, milli in sorted(events):
        if kind == 0:
            outlook.arrive(pk, line, milli, moment)
        elif kind == 1:
            outlook.start(pk, moment)
        else:
            outlook.leave(pk)
    outlook.settle(to_ms(at))
    return outlook


def use_by_person(at: datetime) -> dict[int, int]:
    """Milli-GPU-hours that each person held lately; what ended counts half for each week since."""
    values: dict[str, Any] = {"at": at, "since": at - USE_OVER, "half": HALF_LIFE.total_seconds()}
    with connection.cursor() as cursor:
        cursor.execute(USE, values)
        return {user_id: round(amount) for user_id, amount in cursor.fetchall() if amount and amount >= 0.5}
