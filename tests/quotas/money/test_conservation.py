"""Hours and money are conserved over random lives: price changes, moves, DST days, month ends, lost nodes."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.db import connection
from django.db.models import Count, Sum
from django.test import override_settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portal.accounts.models import DepartmentName
from portal.kernel.clock import set_clock
from portal.kernel.units import cost_micro
from portal.ops.actor import SYSTEM
from quotas.engine.billing import gpu_ms_between, local_day
from quotas.models import LedgerEntry, LedgerSum, PriceRate, UsageSpan
from quotas.services.ledger import ledger_accrue, usage_span_close, usage_span_open
from quotas.services.prices import rate_set
from quotas.services.reconcile import reconcile
from tests.quotas.money.build import named, world

pytestmark = pytest.mark.django_db

BERLIN = ZoneInfo("Europe/Berlin")
ORIGIN = datetime(2026, 3, 25, tzinfo=UTC)  # the 23-hour day of Berlin is 29 March, a month end follows
minutes = st.integers(0, 9 * 24 * 60)
life = st.tuples(
    minutes, st.integers(0, 5 * 24 * 60), st.sampled_from([1, 142, 333, 500, 1000]), st.integers(0, 59_999)
)
story = st.fixed_dictionaries(
    {
        "lives": st.lists(life, min_size=1, max_size=5),
        "prices": st.lists(
            st.tuples(minutes, st.integers(0, 40_000_001)), max_size=4, unique_by=lambda p: p[0]
        ),
        "moves": st.lists(minutes, max_size=3, unique=True),
        "lost_late": st.integers(0, 2000),
    }
)


def moment(minute: int, ms: int = 0) -> datetime:
    return ORIGIN + timedelta(minutes=minute, milliseconds=ms)


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
    w = world()
    events: list[tuple[datetime, int, str, object]] = []
    keys = []
    for number, (start, length, charge, ms) in enumerate(facts["lives"]):
        key = uuid.uuid4()
        keys.append(key)
        end = moment(start + length, ms)
        told = end + timedelta(minutes=facts["lost_late"] if number == 0 else 0)
        events += [(moment(start), number, "open", (key, charge)), (told, number, "close", (key, end))]
    events += [(moment(m), 0, "price", amount) for m, amount in facts["prices"]]
    events += [(ORIGIN + timedelta(days=d, hours=3), 0, "accrue", None) for d in range(18)]
    cuts = sorted({moment(m) for m in facts["moves"]})
    for index, (start, end) in enumerate(zip([ORIGIN, *cuts], [*cuts, None], strict=True)):
        if start != end:
            named(w.vision, f"Lab / Vision {index}", start, end)
    order = {"price": 0, "open": 1, "close": 2, "accrue": 3}
    for at, _number, kind, what in sorted(events, key=lambda e: (e[0], order[e[2]], e[1])):
        with set_clock(at):
            if kind == "open":
                key, charge = what  # type: ignore[misc]
                request = w.request()
                usage_span_open(
                    key=key,
                    request_id=request.pk,
                    department_id=w.vision.pk,
                    user_id=w.user.pk,
                    flavour_id=w.flavour.pk,
                    site_code="",
                    node_name="n",
                    gpu_label="n/0",
                    gpu_uid=None,
                    charge_milli=charge,
                    started_at=at,
                )
            elif kind == "close":
                usage_span_close(key=what[0], ended_at=what[1])  # type: ignore[index]
            elif kind == "price":
                rate_set(acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=what, valid_from=at)  # type: ignore[arg-type]
            else:
                ledger_accrue()
    with set_clock(ORIGIN + timedelta(days=30)):
        before = LedgerEntry.objects.count()
        assert ledger_accrue() == 0
        for key in keys:
            usage_span_close(key=key, ended_at=ORIGIN)
        assert LedgerEntry.objects.count() == before
        assert reconcile().ledger_differences == []

    for span in UsageSpan.objects.all():
        booked = span.entries.aggregate(ms=Sum("gpu_ms"))["ms"] or 0
        assert booked == gpu_ms_between(span.started_at, span.started_at, span.ended_at, span.charge_milli)
    rates = {rate.uid: rate for rate in PriceRate.objects.all()}
    names = {n.path: n.during for n in DepartmentName.objects.filter(department=w.vision)}
    for line in LedgerEntry.objects.select_related("corrects"):
        if line.kind == "correction":
            kept = line.corrects.gpu_ms + line.gpu_ms
            assert kept >= 0
            assert line.corrects.amount_micro + line.amount_micro == cost_micro(kept, line.micro_per_gpu_hour)
            continue
        assert line.local_day == local_day(line.starts_at, BERLIN)
        assert line.booked_month == line.local_day.replace(day=1)
        assert line.amount_micro == cost_micro(line.gpu_ms, line.micro_per_gpu_hour)
        assert local_day(line.ends_at - timedelta(microseconds=1), BERLIN) == line.local_day
        if line.rate_uid:
            during = rates[line.rate_uid].during
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
