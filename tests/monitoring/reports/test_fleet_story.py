"""Random months of two cards: whatever happens, hours and money add up, and every form of a report says the same.

Lives of leases with price changes, moves of the department, the 23-hour day of Berlin, a month end, work taken back (a
life that ends and goes on later), a lost node told late (its lines are corrected), faults, maintenance, telemetry that
is missing or belongs to somebody else's minute, and a correction by hand.
"""

from __future__ import annotations

import csv
import io
import uuid
from datetime import UTC, date, datetime, timedelta

import openpyxl
import pytest
from django.db import connection
from django.db.models import F, Sum
from django.test import Client, override_settings
from django.urls import reverse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monitoring.models import CardDay, CardSpan, GpuRollup, UseDay
from monitoring.selectors.reports.base import ask_from
from monitoring.selectors.reports.kinds import kind_of
from monitoring.services.day_sums import days_sum
from pool.models import Cluster, Gpu, Node, Site
from portal.accounts.models import User
from portal.accounts.policy import policy_of
from portal.kernel.clock import set_clock
from portal.ops.actor import SYSTEM
from quotas.engine.focus import problems
from quotas.models import LedgerEntry
from quotas.selectors.focus import COLUMNS, focus_rows
from quotas.selectors.money import Lines, line_filter
from quotas.services.ledger import ledger_accrue, usage_span_close, usage_span_open
from quotas.services.months import correction_book
from quotas.services.prices import rate_set
from tests.quotas.money.build import World, named, person, world

pytestmark = pytest.mark.django_db
ORIGIN = datetime(2026, 3, 27, 23, tzinfo=UTC)  # midnight in Berlin, a day before the clocks go forward
DAYS = 7
LAST = ORIGIN + timedelta(days=DAYS + 3)
LAST_MINUTE = (DAYS + 3) * 24 * 60
minutes = st.integers(0, DAYS * 24 * 60)
life = st.tuples(st.integers(0, 1500), st.integers(0, 4000), st.sampled_from([333, 500, 1000]), st.booleans())
"""Minutes free before it, its length, its share, whose it is."""
card = st.fixed_dictionaries(
    {
        "lives": st.lists(life, max_size=4),
        "broken": st.none()
        | st.tuples(minutes, st.integers(1, 3000), st.sampled_from(["down", "maintenance"])),
        "hours": st.lists(
            st.tuples(st.integers(0, DAYS * 24), st.integers(0, 3600), st.integers(0, 1000)), max_size=12
        ),
    }
)
story = st.fixed_dictionaries(
    {
        "cards": st.tuples(card, card),
        "prices": st.lists(
            st.tuples(minutes, st.integers(0, 40_000_001)), max_size=3, unique_by=lambda p: p[0]
        ),
        "moves": st.lists(minutes, max_size=2, unique=True),
        "late": st.integers(0, 2000),
        "back": st.integers(0, 5_000_000),
    }
)


def minute(n: int) -> datetime:
    return ORIGIN + timedelta(minutes=n)


@given(story)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@override_settings(GPUPOOL_BILLING_TIME_ZONE="Europe/Berlin")
def test_every_form_of_any_month_adds_up(facts: dict) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SAVEPOINT story")
    try:
        w = live(facts)
        with set_clock(LAST):
            identities()
            forms(w)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ROLLBACK TO SAVEPOINT story")


def live(facts: dict) -> World:
    w = world()
    site = Site.objects.create(code="sh", name="Shanghai")
    node = Node.objects.create(name="n1", cluster=Cluster.objects.create(code="c", name="c", site=site))
    gpus = [
        Gpu.objects.create(
            uuid=f"GPU-{i}", node=node, flavour=w.flavour, index=i, model_name="NVIDIA H800", memory_mib=81559
        )
        for i in range(2)
    ]
    cuts = sorted({minute(m) for m in facts["moves"]})
    for index, (start, end) in enumerate(zip([ORIGIN, *cuts], [*cuts, None], strict=True)):
        if start != end:
            named(w.vision, f"Lab / Vision {index}", start, end)
    events: list[tuple[datetime, int, str, tuple]] = []
    for gpu, what in zip(gpus, facts["cards"], strict=True):
        states(w, gpu, what["broken"])
        for hour, covered, busy in what["hours"]:
            GpuRollup.objects.update_or_create(
                gpu_id=gpu.pk,
                step=3600,
                bucket=ORIGIN + timedelta(hours=hour),
                defaults={"samples": 10, "covered_s": covered, "util_n": 10, "util_sum": 10 * busy},
            )
        at = 0
        for number, (free, length, charge, search) in enumerate(what["lives"]):
            start, end = at + free, at + free + length
            at = end
            key = uuid.uuid4()
            told = end + (facts["late"] if number == 0 else 0)
            if end < LAST_MINUTE:  # told before the books are looked at, as the card was leased again
                told = min(told, LAST_MINUTE - 10)
                told = max(told, end)
            events += [
                (minute(start), 1, "open", (key, gpu, charge, w.search if search else w.vision)),
                (minute(told), 2, "close", (key, minute(end))),
            ]
    events += [(minute(m), 0, "price", (amount,)) for m, amount in facts["prices"]]
    events += [(ORIGIN + timedelta(days=d, hours=3), 3, "accrue", ()) for d in range(DAYS + 3)]
    for at_, _order, kind, what in sorted(events, key=lambda e: e[:2]):
        if at_ < LAST:
            with set_clock(at_):
                happen(w, kind, what, at_)
    with set_clock(LAST - timedelta(minutes=5)):
        ledger_accrue()
        line = LedgerEntry.objects.filter(kind="usage", amount_micro__gt=0, corrections=None).first()
        if line is not None and facts["back"]:
            correction_book(
                acting_user=SYSTEM, entry_uid=line.uid, gpu_ms=0,
                amount_micro=-min(facts["back"], line.amount_micro), reason="by hand",
            )  # fmt: skip
        days_sum(limit=40)
    return w


def happen(w: World, kind: str, what: tuple, at: datetime) -> None:
    if kind == "open":
        key, gpu, charge, department = what
        usage_span_open(
            key=key, request_id=w.request(department).pk, department_id=department.pk, user_id=w.user.pk,
            flavour_id=w.flavour.pk, site_code="sh", node_name="n1", gpu_label=f"n1/{gpu.index}", gpu_uid=gpu.uid,
            charge_milli=charge, started_at=at,
        )  # fmt: skip
    elif kind == "close":
        usage_span_close(key=what[0], ended_at=what[1])
    elif kind == "price":
        rate_set(acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=what[0], valid_from=at)
    else:
        ledger_accrue()


def states(w: World, gpu: Gpu, broken: tuple | None) -> None:
    marks = [(ORIGIN, "ok")]
    if broken:
        start, length, state = broken
        marks += [(minute(start), state), (minute(start + length), "ok")]
    for (start, state), end in zip(marks, [*(m[0] for m in marks[1:]), None], strict=True):
        CardSpan.objects.create(
            gpu=gpu,
            state=state,
            flavour=w.flavour,
            site_code="sh",
            node_name="n1",
            started_at=start,
            ended_at=end,
        )


def identities() -> None:
    """Days of cards and of uses, and the ledger: three ways to the same hours and money."""
    cards = CardDay.objects.values("local_day").annotate(
        allocated=Sum("allocated_ms"),
        installed=Sum("installed_ms"),
        off=Sum(F("down_ms") + F("maintenance_ms")),
    )
    uses = {
        row["local_day"]: row
        for row in UseDay.objects.values("local_day").annotate(
            allocated=Sum("allocated_ms"),
            money=Sum("amount_micro"),
            idle=Sum("idle_ms"),
            unseen=Sum("unknown_ms"),
        )
    }
    lines = {
        row["local_day"]: row
        for row in LedgerEntry.objects.values("local_day").annotate(
            ms=Sum("gpu_ms"), micro=Sum("amount_micro")
        )
    }
    assert {row["local_day"] for row in cards} >= set(uses)
    for row in cards:
        day = row["local_day"]
        hours = 23 if day == date(2026, 3, 29) else 24
        if day < date(2026, 4, 6):
            assert row["installed"] == 2 * hours * 3_600_000
        use = uses.get(day, {"allocated": 0, "idle": 0, "unseen": 0})
        assert row["allocated"] == use["allocated"] <= row["installed"] - row["off"]
        assert 0 <= use["idle"] + use["unseen"] <= use["allocated"]
    running = UseDay.objects.filter(span__ended_at=None)
    if not running.exists():  # with something running the live part is beside the ledger
        for day, use in uses.items():
            assert use["allocated"] == lines[day]["ms"] and use["money"] == lines[day]["micro"]
        assert sum(line["ms"] for line in lines.values()) == sum(use["allocated"] for use in uses.values())


def forms(w: World) -> None:
    """March and April: page, CSV, XLSX and API of chargeback, and FOCUS, against the books; parts against the pool."""
    finance = User.objects.filter(username="fin").first() or person("fin", ("finance", None))
    policy = policy_of(finance)
    client = Client()
    client.force_login(finance)
    client.cookies["django_language"] = "en"
    for month in ("2026-03", "2026-04"):
        books = LedgerEntry.objects.filter(booked_month=date.fromisoformat(f"{month}-01"))
        wanted = books.aggregate(ms=Sum("gpu_ms", default=0), micro=Sum("amount_micro", default=0))
        for by in ("department", "flavour"):
            query = f"?period={month}&by={by}"
            address = reverse("monitoring:report-file", args=["chargeback"])
            rows = list(
                csv.DictReader(io.StringIO(client.get(f"{address}{query}&format=machines").content.decode()))
            )
            assert sum(int(row["hours_gpu_ms"]) for row in rows) == wanted["ms"]
            assert sum(int(row["charge_micro"]) for row in rows) == wanted["micro"]
            api = client.get(f"/api/v1/reports/chargeback/{query}").json()["tables"][0]
            assert dict(zip(api["columns"], api["total"], strict=True))["charge_micro"] == wanted["micro"]
            if rows:
                book = openpyxl.load_workbook(
                    io.BytesIO(client.get(f"{address}{query}&format=xlsx").content), data_only=True
                )
                sheet = book.worksheets[1]
                heads = [cell.value for cell in sheet[1]]
                last = dict(zip(heads, [cell.value for cell in sheet[sheet.max_row]], strict=True))
                assert round(last["To be charged"] * 1_000_000) == wanted["micro"]
        page = client.get(reverse("quotas:month") + f"?month={month}")
        if not page.context["report"].running.lines:
            assert page.context["report"].total.amount_micro == wanted["micro"]
        lines = Lines(policy, line_filter({"month": month}, policy))
        focus = [dict(zip(COLUMNS, row, strict=True)) for row in focus_rows(lines)]
        assert problems(COLUMNS, focus) == []
        assert sum(round(float(row["BilledCost"]) * 1_000_000) for row in focus) == wanted["micro"]
        assert sum(int(row["x_GpuMilliseconds"]) for row in focus) == wanted["ms"]
        kind = kind_of("utilization")
        answer = kind.make(ask_from(kind, {"period": month}, policy))
        installed = CardDay.objects.filter(local_day__year=2026, local_day__month=int(month[-2:]))
        assert answer.whole == installed.aggregate(ms=Sum("installed_ms", default=0))["ms"]
