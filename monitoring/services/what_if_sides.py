"""The sides of a what-if as figures: what was recorded, what the engine makes of it, and of it with the changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.db.models import Sum

from monitoring.models import UseDay
from monitoring.selectors.reports.period import period_from
from monitoring.services.what_if_asking import rows_of
from monitoring.services.what_if_run import PlayFailed, run_play
from pool.engine.past import Piece, Run, Setting
from pool.engine.past_changes import KEEP, Changes, Limits, changed
from pool.engine.past_measures import Measures, measure, percentile
from pool.engine.past_trace import FLAVOUR, JOB_COLUMNS, QUOTA_COLUMNS, trace_past
from pool.models import SchedulingPolicy
from pool.selectors.past import pool_past, pool_setting
from pool.services.snapshot import policy_from
from portal.accounts.policy import DepartmentTree
from quotas.engine.billing import PriceSpan, Use, cut_use
from quotas.engine.ids import NodeId
from quotas.models import GpuFlavour, LedgerSum
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.prices import PriceBook

BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
MS = timedelta(milliseconds=1)

Prices = Callable[[str, str], list[PriceSpan]]
"""Flavour and site → what a GPU-hour costs when."""


@dataclass(frozen=True, slots=True)
class _Window:
    """What is measured: milliseconds, the zone in which its days lie, where the play stops (None: when all is done)."""

    since: int
    until: int
    stop: int | None
    zone: ZoneInfo


class Answerer:
    """Answers one question. ``told(done, total)`` is called meanwhile; once it gives False the answer is not wanted."""

    def __init__(
        self,
        params: Mapping[str, Any],
        *,
        jobs: bytes | None,
        quotas: bytes | None,
        told: Callable[[int, int], bool],
    ) -> None:
        self.params, self.jobs, self.quotas, self.told = params, jobs, quotas, told
        self.given: Mapping[str, Any] = params.get("changes") or {}

    def answer(self) -> dict[str, Any]:
        """The figures of each side, as JSON takes them. PlayFailed when a play was given up."""
        return self._trace() if self.params["source"] == "trace" else self._pool()

    def _pool(self) -> dict[str, Any]:
        period = period_from({"period": "days", "from": self.params["from"], "to": self.params["to"]})
        code = self.params.get("flavour") or ""
        flavour = GpuFlavour.objects.get(code=code) if code else None
        past = pool_past(period.start, period.until, flavour)
        setting = pool_setting(period.start, flavour)
        tree = DepartmentTree.load()
        ids = {row.code: pk for pk, row in tree.rows.items()}
        names = {pk: tree.path(pk) for pk in tree.rows}
        changes = self._changes(ids)
        window = _Window(past.since, past.until, past.until, billing_zone())
        book, flavours = PriceBook.load(), dict(GpuFlavour.objects.values_list("code", "pk"))
        usual: Prices = lambda code, site: book.spans(flavours[code], site)  # noqa: E731
        recorded = side(
            measure(past.pieces, setting, past.recorded, past.since, past.until),
            past.recorded.runs,
            window,
            usual,
            names,
            past.pieces,
        )
        recorded["cost"] = _booked(period.first, period.last, flavour)
        recorded["idle"], idle = _idle(period.first, period.last, flavour)
        return {
            "recorded": recorded,
            **self._both(past.pieces, setting, changes, window, usual, names, idle=idle),
        }

    def _trace(self) -> dict[str, Any]:
        jobs, quotas = (
            rows_of(self.jobs or b"", JOB_COLUMNS, "jobs"),
            rows_of(self.quotas or b"", QUOTA_COLUMNS, "quotas"),
        )
        trace = trace_past(jobs, quotas)
        cards = (self.given.get("nodes") or {}).get(FLAVOUR, 0)
        numbers = {name: pk for pk, name in trace.departments.items()}
        changes = self._changes(numbers, nodes=False)
        window = _Window(0, trace.until, None, ZoneInfo("UTC"))
        usual: Prices = lambda _code, _site: [PriceSpan("a", self.params.get("price") or 0, BEGIN)]  # noqa: E731
        other = trace_past(jobs, quotas, more_cards=cards).setting if cards else trace.setting
        return self._both(trace.pieces, trace.setting, changes, window, usual, trace.departments, other=other)

    def _both(
        self,
        pieces: tuple[Piece, ...],
        setting: Setting,
        changes: Changes,
        window: _Window,
        usual: Prices,
        names: Mapping[int, str],
        other: Setting | None = None,
        idle: Mapping[int, tuple[int, int]] | None = None,
    ) -> dict[str, Any]:
        prices = self.given.get("prices") or {}
        would: Prices = lambda code, site: (  # noqa: E731
            [PriceSpan("b", prices[code], BEGIN)] if code in prices else usual(code, site)
        )
        out: dict[str, Any] = {}
        settings = {"a": setting, "b": changed(other or setting, changes)}
        only_prices = settings["b"] == setting
        whole = len(pieces) * (1 if only_prices else 2)
        found = None
        for number, key in enumerate(("a", "b")):
            if found is None or not only_prices:
                done = number * len(pieces)
                if not self.told(done, whole):
                    raise PlayFailed("forgotten")
                found = run_play(
                    pieces,
                    settings[key],
                    since=window.since,
                    until=window.until,
                    stop=window.stop,
                    told=lambda n, done=done: self.told(done + n, whole),  # type: ignore[misc]
                )
            played, measures = found
            book = usual if key == "a" else would
            out[key] = side(measures, played.runs, window, book, names, pieces, idle)
            out[key] |= {"decisions": played.decisions, "waiting": len(played.waiting)}
        return out

    def _changes(self, numbers: Mapping[str, int], *, nodes: bool = True) -> Changes:
        limits: dict[tuple[NodeId, str], Limits] = {}
        for row in self.given.get("quotas") or []:
            if row["department"] not in numbers:
                raise PlayFailed("department_gone")
            limits[numbers[row["department"]], row["flavour"]] = Limits(
                row.get("guaranteed", KEEP), row.get("borrow_limit", KEEP), row.get("hard_cap", KEEP)
            )
        policy = None
        if uid := self.given.get("policy"):
            policy = policy_from(SchedulingPolicy.objects.get(uid=uid).values)
        if switches := self.given.get("switches"):
            policy = policy_from(switches)
        return Changes(
            limits=limits,
            nodes=(self.given.get("nodes") or {}) if nodes else {},
            borrowing=self.given.get("borrowing", True),
            policy=policy,
        )


def _booked(first: date, last: date, flavour: GpuFlavour | None) -> int:
    """What the ledger says of these days."""
    sums = LedgerSum.objects.filter(local_day__range=(first, last))
    if flavour is not None:
        sums = sums.filter(flavour=flavour)
    return int(sums.aggregate(micro=Sum("amount_micro", default=0))["micro"])


def _idle(first: date, last: date, flavour: GpuFlavour | None) -> tuple[int, dict[int, tuple[int, int]]]:
    """GPU-milliseconds held idle on these days, and of each request what it idled of what it held then."""
    sums = UseDay.objects.filter(local_day__range=(first, last))
    if flavour is not None:
        sums = sums.filter(flavour=flavour)
    parts = (
        sums.values_list("request_id_ref").annotate(i=Sum("idle_ms"), a=Sum("allocated_ms")).filter(a__gt=0)
    )
    found = {request: (idle, held) for request, idle, held in parts}
    return sum(idle for idle, _held in found.values()), found


def side(
    measures: Measures,
    runs: Iterable[Run],
    window: _Window,
    prices: Prices,
    names: Mapping[int, str],
    pieces: Iterable[Piece],
    idle: Mapping[int, tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """One side as integers: totals, by department and flavour, by day. `idle`: of each request, what it idled of what
    it held; work without telemetry idles nothing, as in every report.
    """
    home = {piece.request.id: piece.request.department_id for piece in pieces}
    cost: dict[tuple[int, str], int] = defaultdict(int)
    days: dict[str, int] = defaultdict(int)
    held: dict[int, int] = defaultdict(int)
    for run in runs:
        start, end = max(run.start, window.since), min(run.end, window.until)
        if end <= start or not run.flavour:
            continue
        use = Use(BEGIN + start * MS, BEGIN + end * MS, run.charge_milli)
        for cut in cut_use(use, prices=prices(run.flavour, run.site), owners=(), zone=window.zone):
            cost[home[run.request_id], run.flavour] += cut.amount_micro
            days[cut.day.isoformat()] += cut.gpu_ms
            held[run.request_id] += cut.gpu_ms
    waits = measures.waits()
    groups = [
        {
            "department": names.get(department, str(department)),
            "flavour": flavour,
            "asked": group.asked,
            "started": group.started,
            "p50": group.wait(500),
            "p90": group.wait(900),
            "longest": max(group.waits, default=None),
            "held": group.held,
            "lost": group.lost,
            "taken": dict(sorted(group.taken.items())),
            "cost": cost[department, flavour],
        }
        for (department, flavour), group in sorted(measures.groups.items())
    ]
    return {
        "flavours": {
            code: {
                "installed": one.installed,
                "held": one.held,
                "idle_wanted": one.idle_wanted,
                "shortfall": one.shortfall,
                "borrowed": one.borrowed,
            }
            for code, one in measures.flavours.items()
        },
        "groups": groups,
        "days": dict(sorted(days.items())),
        "asked": sum(group.asked for group in measures.groups.values()),
        "started": len(waits),
        "p50": percentile(waits, 500),
        "p90": percentile(waits, 900),
        "longest": max(waits, default=None),
        "lost": sum(group.lost for group in measures.groups.values()),
        "taken": _added(group.taken for group in measures.groups.values()),
        "cost": sum(cost.values()),
        "idle": None
        if idle is None
        else sum(held[request] * part // whole for request, (part, whole) in idle.items()),
    }


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    out: dict[str, int] = defaultdict(int)
    for one in counts:
        for cause, n in one.items():
            out[cause] += n
    return dict(sorted(out.items()))
