"""Waits, and capacity: how long people waited for what, and what more there would have had to be."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Aggregate, Count, DurationField, ExpressionWrapper, F, Min, Q, QuerySet
from django.utils.translation import gettext as _

from monitoring.selectors.reports.base import Answer, Ask, Stat, head_case
from monitoring.selectors.reports.used import Cards, Pool, drill, group_word, groups_of, label_of
from pool.models import Allocation
from portal.kernel.tables import COUNT, GPUS, HOURS, PERCENT, SECONDS, Column, Table, share
from portal.kernel.units import MILLI_PER_GPU
from quotas.models import CapacityRequest, GpuFlavour
from quotas.selectors.month_report import heads, name_users

MS = timedelta(milliseconds=1)


class Rank(Aggregate):
    """The value at a share of the ordered values (nearest rank): `percentile_disc`."""

    template = "percentile_disc(%(share)s) WITHIN GROUP (ORDER BY %(expressions)s)"
    output_field = DurationField()

    def __init__(self, expression: Any, share: float, **extra: Any) -> None:
        super().__init__(expression, share=share, **extra)


def _scope(ask: Ask) -> Q:
    scope, chosen = ask.policy.reads_money, ask.chosen
    query = Q() if scope.everything else scope.q("department_id") | Q(requester_id=ask.policy.user.pk)
    if chosen.department_id is not None:
        query &= Q(department_id__in=ask.policy.tree.subtree(chosen.department_id))
    if chosen.user is not None:
        query &= Q(requester_id=chosen.user.pk)
    return query


def _allocated(ask: Ask) -> QuerySet[Allocation]:
    """Allocations made in the period, with the wait of their request in the queue (work that was taken back and
    waited again counts again: `queued_at` is its place in line)."""
    query = Q(
        reserved_at__gte=ask.period.start, reserved_at__lt=ask.period.end, request__queued_at__isnull=False
    )
    query &= Q(reserved_at__gte=F("request__queued_at"))
    scope, chosen = ask.policy.reads_money, ask.chosen
    if not scope.everything:
        query &= scope.q("department_id") | Q(holder_id=ask.policy.user.pk)
    if chosen.department_id is not None:
        query &= Q(department_id__in=ask.policy.tree.subtree(chosen.department_id))
    if chosen.user is not None:
        query &= Q(holder_id=chosen.user.pk)
    if chosen.flavour is not None:
        query &= Q(flavour_id=chosen.flavour.pk)
    return (
        Allocation.objects.order_by()
        .filter(query)
        .annotate(
            wait=ExpressionWrapper(F("reserved_at") - F("request__queued_at"), output_field=DurationField())
        )
    )


def _key(ask: Ask) -> Any:
    if ask.by == "department":
        _parent, children = heads(ask.policy, ask.chosen)
        return head_case(ask.policy, children, "department_id")
    return F({"flavour": "flavour_id", "user": "holder_id"}[ask.by])


def seconds(wait: Any) -> int | None:
    """Whole seconds of a wait (a timedelta, or None)."""
    return None if wait is None else wait // timedelta(seconds=1)


MEASURES = {
    "n": Count("pk"),
    "p50": Rank(F("wait"), 0.5),
    "p90": Rank(F("wait"), 0.9),
}


def waits(ask: Ask) -> Answer:
    """Time from joining the queue to getting the GPUs: median and the nine in ten."""
    groups, _fold = groups_of(ask)
    found = _allocated(ask).annotate(key=_key(ask)).values("key").annotate(**MEASURES)
    columns = [
        Column("group", group_word(ask.by)),
        Column("n", _("Starts"), COUNT),
        Column("p50", _("Half waited at most, s"), SECONDS, added=False),
        Column("p90", _("Nine in ten waited at most, s"), SECONDS, added=False),
        Column("waiting", _("Waiting now"), COUNT),
    ]
    table = Table(_("Waits"), columns)
    waiting = _waiting_now(ask)
    rows = {row["key"]: row for row in found}
    for key in {*rows, *waiting}:
        groups[key]
    if ask.by == "user":
        name_users(groups.values())
    order = sorted(
        {*rows, *waiting}, key=lambda k: (-(rows[k]["n"] if k in rows else 0), groups[k].label, str(k))
    )
    for key in order:
        row = rows.get(key, {"n": 0, "p50": None, "p90": None})
        table.rows.append(
            [label_of(groups[key]), row["n"], seconds(row["p50"]), seconds(row["p90"]), waiting.get(key, 0)]
        )
        table.params.append(drill(ask, groups[key]))
    earlier = ask.period.before()
    whole, before = (_allocated(one).aggregate(**MEASURES) for one in (ask, replace(ask, period=earlier)))
    return Answer(
        tables=[table],
        stats=[
            Stat(
                _("Half waited at most"),
                seconds(whole["p50"]),
                SECONDS,
                _("median of all starts"),
                seconds(before["p50"]),
            ),
            Stat(_("Nine in ten waited at most"), seconds(whole["p90"]), SECONDS, "", seconds(before["p90"])),
            Stat(_("Starts"), whole["n"], COUNT, _("allocations made in the period"), before["n"]),
            Stat(_("Waiting now"), sum(waiting.values()), COUNT, _("requests in the queue")),
        ],
        before=earlier,
        definitions=[
            _("Wait: from joining the queue (approved and ready) until GPUs were reserved for it."),
            _("Percentiles are those of the starts in the period, by nearest rank; they do not add up."),
            _("Who still waits is not in the percentiles; the last column counts them."),
        ],
    )


def _waiting_now(ask: Ask) -> dict[Any, int]:
    query = _scope(ask) & Q(state=CapacityRequest.State.QUEUED)
    if ask.chosen.flavour is not None:
        query &= Q(flavour_id=ask.chosen.flavour.pk)
    key = _key(ask) if ask.by != "user" else F("requester_id")
    found = (
        CapacityRequest.objects.order_by()
        .filter(query)
        .annotate(key=key)
        .values_list("key")
        .annotate(n=Count("pk"))
    )
    return dict(found)


@dataclass
class _Unmet:
    """Waiting of one flavour within a period."""

    gpu_ms: int = 0
    requests: int = 0
    waiting_milli: int = 0


def capacity(ask: Ask) -> Answer:
    """What there is, how full it was, and what people waited for: by flavour."""
    unmet = _unmet(ask)
    pools = Cards.read(ask).by(1)
    flavours = {f.pk: f for f in GpuFlavour.objects.order_by("position", "name")}
    length = max(1, (ask.period.until - ask.period.start) // MS)
    columns = [
        Column("flavour", _("Flavour")),
        Column("installed", _("Installed on average, GPUs"), GPUS),
        Column("use", _("Allocated of installed, %"), PERCENT),
        Column("unmet", _("Waited for"), HOURS),
        Column("more", _("Waited for on average, GPUs"), GPUS),
        Column("requests", _("Requests that waited"), COUNT),
        Column("waiting", _("Waiting now, GPUs"), GPUS),
    ]
    table = Table(_("Capacity"), columns)
    for pk in sorted({*flavours, *(k for k in unmet if k is not None)}, key=lambda k: (-unmet[k].gpu_ms, k)):
        flavour = flavours.get(pk)
        if flavour is None or (ask.chosen.flavour is not None and ask.chosen.flavour.pk != pk):
            continue
        cards = pools.get(pk, Pool())
        if not cards.installed_ms and not unmet[pk].requests:
            continue
        row = unmet[pk]
        table.rows.append(
            [
                flavour.name, MILLI_PER_GPU * cards.installed_ms // length,
                share(cards.allocated_ms, cards.installed_ms), row.gpu_ms,
                MILLI_PER_GPU * row.gpu_ms // length, row.requests, row.waiting_milli,
            ]
        )  # fmt: skip
        table.params.append({"flavour": flavour.code})
    total = sum(row.gpu_ms for row in unmet.values())
    return Answer(
        tables=[table],
        stats=[
            Stat(_("Waited for"), total, HOURS, _("GPUs asked for × time in the queue")),
            Stat(_("Requests that waited"), sum(r.requests for r in unmet.values()), COUNT),
        ],
        definitions=[
            _("Waited for: GPUs asked for, times how long they stood in the queue within the period."),
            _(
                "On average: that, divided by the length of the period: so many GPUs more would have been busy waiting."
            ),
            _("It says what demand was there, not that it fits: a gang needs its GPUs at once and together."),
        ],
    )


def _unmet(ask: Ask) -> dict[Any, _Unmet]:
    start, until = ask.period.start, ask.period.until
    rows = (
        CapacityRequest.objects.order_by()
        .filter(_scope(ask) & Q(queued_at__isnull=False, queued_at__lt=until))
        .annotate(first=Min("allocations__reserved_at"))
        .filter(Q(first__gt=start) | Q(first=None, state=CapacityRequest.State.QUEUED))
        .values_list("flavour_id", "charge_milli", "queued_at", "first")
    )
    found: dict[Any, _Unmet] = defaultdict(_Unmet)
    for flavour, charge, queued, first in rows:
        if queued is None:
            continue
        end: datetime = min(first or until, until)
        waited = end - max(queued, start)
        entry = found[flavour]
        if first is None:
            entry.waiting_milli += charge
        if waited > timedelta(0):
            entry.gpu_ms += charge * (waited // MS) // MILLI_PER_GPU
            entry.requests += 1
    return found
