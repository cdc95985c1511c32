"""Hours and money are conserved over random lives: price changes (some late), moves, days of 23 and 25 hours, month
ends, preemptions, lost nodes, clocks that are wrong, corrections by hand."""

from __future__ import annotations

import contextlib
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest
from django.db import connection
from django.db.models import Count, Q, Sum
from django.test import override_settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portal.accounts.models import DepartmentName, User
from portal.accounts.policy import policy_of
from portal.kernel.clock import set_clock
from portal.kernel.errors import Conflict
from portal.kernel.units import cost_micro
from portal.ops.actor import SYSTEM
from quotas.engine.billing import gpu_ms_between, local_day
from quotas.engine.focus import problems
from quotas.models import LedgerEntry, LedgerSum, PriceRate, UsageSpan
from quotas.selectors.focus import COLUMNS, focus_rows
from quotas.selectors.money import LineFilter, Lines
from quotas.services.ledger import (
    ENDED_EARLIER,
    TAKEN_TWICE,
    ledger_accrue,
    usage_span_close,
    usage_span_open,
)
from quotas.services.months import correction_book
from quotas.services.prices import rate_set
from quotas.services.reconcile import reconcile
from tests.quotas.money.build import World, named, person, world

pytestmark = pytest.mark.django_db

BERLIN = ZoneInfo("Europe/Berlin")
ORIGINS = (
    datetime(2026, 3, 25, tzinfo=UTC),  # the 23-hour day of Berlin is 29 March, a month end follows
    datetime(2026, 10, 22, tzinfo=UTC),  # its day of 25 hours is 25 October, a month end follows
)
minutes = st.integers(0, 9 * 24 * 60)
life = st.fixed_dictionaries(
    {
        "start": minutes,
        "length": st.integers(0, 5 * 24 * 60),
        "charge": st.sampled_from([1, 142, 333, 500, 1000]),
        "ms": st.integers(0, 59_999),
        "again_after": st.none() | st.integers(0, 600),  # taken back, and going on later: preemption
        "told_late": st.sampled_from([0, 0, 90, 2000]),  # a node that was lost
        "skew_s": st.sampled_from([0, 0, 0, -7200, -5, 5, 900]),  # what the node's clock says of the end
    }
)
story = st.fixed_dictionaries(
    {
        "origin": st.sampled_from(ORIGINS),
        "lives": st.lists(life, min_size=1, max_size=4),
        "prices": st.lists(
            st.tuples(minutes, st.integers(0, 40_000_001), st.sampled_from([0, 0, 3000])),
            max_size=4,
            unique_by=lambda p: p[0],
        ),
        "moves": st.lists(minutes, max_size=3, unique=True),
        "corrections": st.lists(
            st.tuples(minutes, st.integers(0, 99), st.integers(0, 100), st.integers(0, 100)), max_size=3
        ),
    }
)


@given(story)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@override_settings(GPUPOOL_BILLING_TIME_ZONE="Europe/Berlin")
def test_hours_and_money_are_conserved(facts: dict) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SAVEPOINT story")
    try:
        live_through(facts)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ROLLBACK TO SAVEPOINT story")


def live_through(facts: dict) -> None:
    """Price changes, some set late for the past; renames and moves; ends told late, by clocks that are wrong; work
    that is taken back and goes on; corrections by hand; bookings all along. Then the books are looked at.
    """
    origin = facts["origin"]

    def moment(minute: int, ms: int = 0) -> datetime:
        return origin + timedelta(minutes=minute, milliseconds=ms)

    w = world()
    events: list[tuple[datetime, int, str, tuple]] = []
    keys = []
    for number, one in enumerate(facts["lives"]):
        lives = [(one["start"], one["length"])]
        if one["again_after"] is not None:
            half = one["length"] // 2
            lives = [(one["start"], half), (one["start"] + half + one["again_after"], half)]
        for start, length in lives:
            key = uuid.uuid4()
            keys.append(key)
            end = moment(start + length, one["ms"])
            said = end + timedelta(seconds=one["skew_s"])
            events += [
                (moment(start), number, "open", (key, one["charge"])),
                (end + timedelta(minutes=one["told_late"]), number, "close", (key, said)),
            ]
    events += [(moment(m), 0, "price", (amount, moment(m - late))) for m, amount, late in facts["prices"]]
    events += [(moment(m), 0, "correct", rest) for m, *rest in facts["corrections"]]
    events += [(origin + timedelta(days=d, hours=3), 0, "accrue", ()) for d in range(18)]
    cuts = sorted({moment(m) for m in facts["moves"]})
    for index, (start, end) in enumerate(zip([origin, *cuts], [*cuts, None], strict=True)):
        if start != end:
            named(w.vision, f"Lab / Vision {index}", start, end)
    order = {"price": 0, "open": 1, "close": 2, "accrue": 3, "correct": 4}
    for at, _number, kind, what in sorted(events, key=lambda e: (e[0], order[e[2]], e[1])):
        with set_clock(at):
            happen(w, kind, what, at)
    with set_clock(origin + timedelta(days=30)):
        before = LedgerEntry.objects.count()
        assert ledger_accrue() == 0
        for key in keys:
            usage_span_close(key=key, ended_at=origin)
        assert LedgerEntry.objects.count() == before
        found = reconcile()
        assert found.ledger_differences == [] and found.sum_differences == []
    look(w)


def happen(w: World, kind: str, what: tuple, at: datetime) -> None:
    if kind == "open":
        key, charge = what
        usage_span_open(
            key=key, request_id=w.request().pk, department_id=w.vision.pk, user_id=w.user.pk, flavour_id=w.flavour.pk,
            site_code="", node_name="n", gpu_label="n/0", gpu_uid=None, charge_milli=charge, started_at=at,
        )  # fmt: skip
    elif kind == "close":
        usage_span_close(key=what[0], ended_at=what[1])
    elif kind == "price":
        amount, since = what
        with contextlib.suppress(Conflict):  # lines with a price exist since: the past is refused
            rate_set(acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=amount, valid_from=since)
    elif kind == "correct":
        correct(*what)
    else:
        ledger_accrue()


def correct(which: int, hours: int, money: int) -> None:
    """Some percent of what a line still holds, taken back by hand."""
    lines = list(LedgerEntry.objects.filter(kind="usage").order_by("id"))
    if not lines:
        return
    line = lines[which % len(lines)]
    taken = line.corrections.aggregate(h=Sum("gpu_ms", default=0), m=Sum("amount_micro", default=0))
    h, m = hours * (line.gpu_ms + taken["h"]) // 100, money * (line.amount_micro + taken["m"]) // 100
    if h or m:
        correction_book(acting_user=SYSTEM, entry_uid=line.uid, gpu_ms=-h, amount_micro=-m, reason="by hand")


def look(w: World) -> None:
    """Hours of each span, the shape and money of each line, days against months, sums against lines, and FOCUS."""
    for span in UsageSpan.objects.all():
        own = span.entries.filter(Q(kind="usage") | Q(reason=ENDED_EARLIER))
        booked = own.aggregate(ms=Sum("gpu_ms"))["ms"] or 0
        assert booked == gpu_ms_between(span.started_at, span.started_at, span.ended_at, span.charge_milli)
    rates = {rate.uid: rate for rate in PriceRate.objects.all()}
    names = {n.path: n.during for n in DepartmentName.objects.filter(department=w.vision)}
    for line in LedgerEntry.objects.filter(kind="usage").prefetch_related("corrections"):
        corrections = list(line.corrections.all())
        net_ms = line.gpu_ms + sum(c.gpu_ms for c in corrections)
        net_micro = line.amount_micro + sum(c.amount_micro for c in corrections)
        assert net_ms >= 0 and net_micro >= 0
        priced = next((c for c in corrections if c.rate_uid and not line.rate_uid), line)
        if not any(c.reason in {"by hand", TAKEN_TWICE} for c in corrections):
            assert net_micro == cost_micro(net_ms, priced.micro_per_gpu_hour)
        assert line.local_day == local_day(line.starts_at, BERLIN)
        assert line.booked_month == line.local_day.replace(day=1)
        assert line.amount_micro == cost_micro(line.gpu_ms, line.micro_per_gpu_hour)
        assert local_day(line.ends_at - timedelta(microseconds=1), BERLIN) == line.local_day
        for uid in {line.rate_uid, priced.rate_uid} - {None}:
            during = rates[uid].during
            assert during.lower <= line.starts_at
            assert during.upper is None or line.ends_at <= during.upper
        if line.department_path in names:
            during = names[line.department_path]
            assert during.lower <= line.starts_at
            assert during.upper is None or line.ends_at <= during.upper
    kept = LedgerSum.objects.aggregate(m=Sum("amount_micro"), h=Sum("gpu_ms"), n=Sum("lines", default=0))
    lines = LedgerEntry.objects.aggregate(m=Sum("amount_micro"), h=Sum("gpu_ms"), n=Count("pk"))
    assert kept == lines
    by_day = LedgerEntry.objects.values("local_day").annotate(m=Sum("amount_micro"), h=Sum("gpu_ms"))
    by_month = LedgerEntry.objects.values("booked_month").annotate(m=Sum("amount_micro"), h=Sum("gpu_ms"))
    assert sum(d["m"] for d in by_day) == sum(m["m"] for m in by_month)
    assert sum(d["h"] for d in by_day) == sum(m["h"] for m in by_month)
    finance = policy_of(User.objects.filter(username="fin").first() or person("fin", ("finance", None)))
    for month in by_month:
        of_month = Lines(finance, LineFilter(month=month["booked_month"]))
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in focus_rows(of_month)]
        wrong = problems(COLUMNS, rows)
        assert wrong == [], [rows[problem.row - 1] for problem in wrong]
        assert sum(int(row["x_GpuMilliseconds"]) for row in rows) == month["h"]
        assert sum(Decimal(row["BilledCost"]) for row in rows) * 1_000_000 == month["m"]
