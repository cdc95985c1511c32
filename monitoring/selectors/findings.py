"""Who sees which findings, their sums by kind, and the pool's use before and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from uuid import UUID

from django.db.models import Q, QuerySet, Sum
from django.utils.translation import gettext_lazy as _

from monitoring.models import CardDay, Finding, FindingDay, UseDay
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import NotFound
from quotas.engine.billing import local_day
from quotas.selectors.billing_time import billing_zone

WEEKS = 8
SORTS = {"money": "-micro", "hours": "-gpu_ms", "newest": "-since", "oldest": "since"}


def findings_visible(policy: Policy) -> QuerySet[Finding]:
    """One's own, and those of departments that one reads; those of no department for who reads everything."""
    return Finding.objects.filter(
        Q(holder_id=getattr(policy.user, "pk", None)) | policy.reads.q("department_id")
    )


def finding_for(policy: Policy, uid: UUID) -> Finding:
    """One finding, or `NotFound` for one that does not exist or is not the reader's to see."""
    found = (
        findings_visible(policy)
        .select_related("holder", "department", "flavour", "gpu__node", "allocation__request")
        .filter(uid=uid)
        .first()
    )
    if found is None:
        raise NotFound(code="not_found", detail=_("There is no such finding here."))
    return found


@dataclass
class KindSum:
    """One kind in the last seven days: GPU-milliseconds, money, findings open now, and GPU-ms of eight weeks."""

    kind: str
    gpu_ms: int = 0
    micro: int = 0
    open: int = 0
    weeks: list[int] = field(default_factory=lambda: [0] * WEEKS)


def kind_sums(policy: Policy, *, today: date | None = None) -> dict[str, KindSum]:
    """Kind → its sums over what the reader sees, today included; dismissed findings are not counted. Two queries."""
    today = today or local_day(now(), billing_zone())
    out = {kind: KindSum(kind) for kind in Finding.Kind.values}
    seen = findings_visible(policy).exclude(state=Finding.State.DISMISSED)
    days = (
        FindingDay.objects.filter(
            finding__in=seen, local_day__gt=today - timedelta(weeks=WEEKS), local_day__lte=today
        )
        .values_list("finding__kind", "local_day")
        .annotate(Sum("gpu_ms"), Sum("micro"))
    )
    for kind, day, gpu_ms, micro in days:
        back = (today - day).days // 7
        out[kind].weeks[WEEKS - 1 - back] += gpu_ms
        if back == 0:
            out[kind].gpu_ms += gpu_ms
            out[kind].micro += micro
    for kind in seen.filter(state=Finding.State.OPEN).values_list("kind", flat=True):
        out[kind].open += 1
    return out


def finding_lines(ids: list[int], *, today: date | None = None) -> Mapping[int, list[int]]:
    """Finding → GPU-milliseconds of each of the last seven days, for a spark. One query."""
    today = today or local_day(now(), billing_zone())
    out: dict[int, list[int]] = {pk: [0] * 7 for pk in ids}
    rows = FindingDay.objects.filter(finding__in=ids, local_day__gt=today - timedelta(days=7))
    for pk, day, gpu_ms in rows.values_list("finding_id", "local_day", "gpu_ms"):
        back = (today - day).days
        if 0 <= back < 7:
            out[pk][6 - back] += gpu_ms
    return out


@dataclass(frozen=True, slots=True)
class Period:
    """The whole pool over some days, in GPU-milliseconds. Effective = allocated − idle."""

    first: date
    last: date
    installed: int
    allocated: int
    idle: int

    @property
    def effective(self) -> int:
        """Held and not seen idle."""
        return self.allocated - self.idle


def pool_weeks(*, weeks: int = 26, today: date | None = None) -> list[Period]:
    """Whole weeks (Monday to Sunday) of the pool's use, oldest first; a week without data is left out. Two queries."""
    today = today or local_day(now(), billing_zone())
    monday = today - timedelta(days=today.weekday())
    first = monday - timedelta(weeks=weeks)
    sums: dict[date, list[int]] = defaultdict(lambda: [0, 0, 0])
    cards = CardDay.objects.filter(local_day__gte=first, local_day__lt=monday)
    for day, installed in cards.values_list("local_day").annotate(Sum("installed_ms")):
        sums[day - timedelta(days=day.weekday())][0] += installed
    uses = UseDay.objects.filter(local_day__gte=first, local_day__lt=monday)
    for day, allocated, idle in uses.values_list("local_day").annotate(Sum("allocated_ms"), Sum("idle_ms")):
        week = sums[day - timedelta(days=day.weekday())]
        week[1] += allocated
        week[2] += idle
    return [
        Period(week, week + timedelta(days=6), *values) for week, values in sorted(sums.items()) if values[0]
    ]


def before_and_after(
    weeks: list[Period], turn: date, *, most: int = 4
) -> tuple[Period | None, Period | None]:
    """The up to four whole weeks before the turn and the last up to four after it; None where there is none."""
    earlier = [week for week in weeks if week.last < turn][-most:]
    later = [week for week in weeks if week.first >= turn][-most:]
    return _joined(earlier), _joined(later)


def _joined(weeks: list[Period]) -> Period | None:
    if not weeks:
        return None
    return Period(
        weeks[0].first,
        weeks[-1].last,
        sum(week.installed for week in weeks),
        sum(week.allocated for week in weeks),
        sum(week.idle for week in weeks),
    )


def first_found() -> date | None:
    """The day on which the first finding was opened: the turn between before and after."""
    first = Finding.objects.order_by("created_at").values_list("created_at", flat=True).first()
    return local_day(first, billing_zone()) if first is not None else None
