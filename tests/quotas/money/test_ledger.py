"""The ledger adds up whatever happens to a lease, and is never written twice."""

from __future__ import annotations

from datetime import date, datetime, timedelta

import pytest
from django.db import DatabaseError, connection, transaction
from django.db.models import Sum

from portal.kernel.clock import set_clock
from portal.kernel.errors import NotFound
from portal.kernel.units import MS_PER_HOUR
from portal.ops.actor import SYSTEM
from portal.ops.models import Incident
from quotas.models import LedgerEntry, UsageSpan
from quotas.services.ledger import ENDED_EARLIER, ledger_accrue, usage_span_close
from quotas.services.months import correction_book
from quotas.services.prices import rate_set
from quotas.services.reconcile import reconcile
from tests.quotas.money.build import at, named, world

pytestmark = pytest.mark.django_db


def rows() -> list[tuple[str, int, int]]:
    """(day, hours as ms, micro) of all lines in order."""
    return [
        (f"{e.local_day:%m-%d}", e.gpu_ms, e.amount_micro)
        for e in LedgerEntry.objects.order_by("starts_at", "id")
    ]


def accrue(moment: datetime) -> int:
    with set_clock(moment):
        return ledger_accrue()


def test_a_lease_over_midnight_makes_a_line_per_local_day() -> None:
    w = world()
    w.price("16", at("2026-06-01"))
    w.lease(at("2026-06-15 22:30"), at("2026-06-16 01:00"))
    assert rows() == [("06-15", 90 * 60_000, 24_000_000), ("06-16", MS_PER_HOUR, 16_000_000)]
    line = LedgerEntry.objects.order_by("id")[0]
    assert (line.user_name, line.cost_code, line.department_path, line.booked_month) == (
        "Lin Yue",
        "V-1",
        "Lab / Vision",
        date(2026, 6, 1),
    )
    assert line.starts_at == at("2026-06-15 22:30")
    assert line.ends_at == at("2026-06-16 00:00")


def test_P027_half_an_hour_on_each_side_of_local_midnight_and_the_session_is_in_utc() -> None:
    w = world()
    w.price("16", at("2026-06-01"))
    with connection.cursor() as cursor:
        cursor.execute("SHOW TIME ZONE")
        assert cursor.fetchone() == ("UTC",)  # set on every connection, whatever the server's own zone is
    w.lease(at("2026-06-15 23:30"), at("2026-06-16 00:30"))
    half = MS_PER_HOUR // 2
    assert rows() == [("06-15", half, 8_000_000), ("06-16", half, 8_000_000)]


def test_a_new_price_cuts_and_is_not_applied_backwards() -> None:
    w = world()
    w.price("16", at("2026-06-01"))
    span = w.lease(at("2026-06-15 10:00"))
    w.price("10", at("2026-06-15 12:00"))
    w.close(span, at("2026-06-15 13:00"))
    assert rows() == [("06-15", 2 * MS_PER_HOUR, 32_000_000), ("06-15", MS_PER_HOUR, 10_000_000)]


def test_a_sites_own_price_beats_the_general_one() -> None:
    w = world()
    w.price("16", at("2026-06-01"))
    w.price("12", at("2026-06-15 11:00"), site="bj")
    w.lease(at("2026-06-15 10:00"), at("2026-06-15 12:00"), site="bj")
    w.lease(at("2026-06-15 10:00"), at("2026-06-15 12:00"), site="sh")
    assert sorted(r[2] for r in rows()) == [12_000_000, 16_000_000, 32_000_000]


def test_a_moved_department_cuts_and_keeps_the_names_of_the_time() -> None:
    w = world()
    w.price("16", at("2026-06-01"))
    named(w.vision, "Lab / Vision", at("2026-06-01"), at("2026-06-15 11:00"))
    named(w.vision, "Lab / Search / Vision", at("2026-06-15 11:00"))
    w.lease(at("2026-06-15 10:00"), at("2026-06-15 12:00"))
    assert list(LedgerEntry.objects.order_by("starts_at").values_list("department_path", "gpu_ms")) == [
        ("Lab / Vision", MS_PER_HOUR),
        ("Lab / Search / Vision", MS_PER_HOUR),
    ]


def test_open_spans_are_booked_by_whole_days_and_the_rest_at_the_end() -> None:
    w = world()
    w.price("16", at("2026-06-01"))
    span = w.lease(at("2026-06-14 22:00"))
    assert accrue(at("2026-06-14 23:59")) == 0
    assert accrue(at("2026-06-15 00:10")) == 0  # the day has just ended: late news may still come
    assert accrue(at("2026-06-16 00:20")) == 2
    assert accrue(at("2026-06-16 09:00")) == 0  # running it again changes nothing
    w.close(span, at("2026-06-16 10:00"))
    assert accrue(at("2026-06-18 10:00")) == 0
    assert [r[1] // MS_PER_HOUR for r in rows()] == [2, 24, 10]


def test_closing_twice_and_opening_twice_change_nothing() -> None:
    w = world()
    w.price("16", at("2026-06-01"))
    span = w.lease(at("2026-06-15 10:00"), at("2026-06-15 12:00"))
    w.close(span, at("2026-06-15 18:00"))
    assert len(rows()) == 1
    assert UsageSpan.objects.get().ended_at == at("2026-06-15 12:00")
    with pytest.raises(NotFound):
        usage_span_close(key="0198f6a0-0000-7000-8000-000000000000", ended_at=at("2026-06-15 18:00"))


def test_an_end_earlier_than_what_was_booked_is_corrected() -> None:
    w = world()
    w.price("16", at("2026-06-01"))
    span = w.lease(at("2026-06-14 22:00"))
    accrue(at("2026-06-16 00:20"))
    w.close(span, at("2026-06-15 06:00"))  # the node was lost then, and seen lost only now
    total = LedgerEntry.objects.aggregate(ms=Sum("gpu_ms"), micro=Sum("amount_micro"))
    assert total == {"ms": 8 * MS_PER_HOUR, "micro": 8 * 16_000_000}
    correction = LedgerEntry.objects.get(kind="correction")
    assert correction.reason == ENDED_EARLIER
    assert correction.gpu_ms == -18 * MS_PER_HOUR


def test_use_without_a_price_costs_nothing_and_is_told() -> None:
    w = world()
    w.lease(at("2026-06-15 10:00"), at("2026-06-15 12:00"))
    line = LedgerEntry.objects.get()
    assert (line.rate_uid, line.micro_per_gpu_hour, line.amount_micro) == (None, 0, 0)
    assert Incident.objects.get(kind="price_missing").facts["flavour"] == "H800 80GB"
    w.price("16", at("2026-06-15 00:00"))  # set afterwards: the line gets its money by a correction
    assert LedgerEntry.objects.aggregate(m=Sum("amount_micro"))["m"] == 32_000_000
    assert Incident.objects.get(kind="price_missing").state == "closed"
    assert LedgerEntry.objects.aggregate(h=Sum("gpu_ms"))["h"] == 2 * MS_PER_HOUR


def test_a_share_of_a_card_costs_its_share() -> None:
    w = world()
    w.price("16", at("2026-06-01"))
    w.lease(at("2026-06-15 10:00"), at("2026-06-15 10:00") + timedelta(milliseconds=3), charge=142)
    assert [r[1] for r in rows()] == [0]  # 142 × 3 ÷ 1000, cut
    w.lease(at("2026-06-15 10:00"), at("2026-06-15 11:00"), charge=142)
    assert rows()[-1][1:] == (511_200, 2_272_000)


def test_the_database_refuses_changes_of_the_ledger() -> None:
    w = world()
    w.lease(at("2026-06-15 10:00"), at("2026-06-15 12:00"))
    for act in (
        lambda: LedgerEntry.objects.update(amount_micro=1),
        lambda: LedgerEntry.objects.all()._raw_delete("default"),
    ):
        with pytest.raises(DatabaseError), transaction.atomic():
            act()


def test_a_late_end_takes_back_the_money_that_a_late_price_gave() -> None:
    """Booked without a price, priced at 10 the day after, and then the node turns out to have been lost at noon."""
    w = world()
    span = w.lease(at("2026-05-01T00:00"))
    with set_clock(at("2026-05-02T01:00")):
        ledger_accrue()
        rate_set(
            acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=10_000_000, valid_from=at("2026-05-01T00:00"),
        )  # fmt: skip
    w.close(span, at("2026-05-01T12:00"))
    rows = list(LedgerEntry.objects.order_by("id").values_list("kind", "gpu_ms", "amount_micro", "reason"))
    hour = 3_600_000
    assert rows == [
        ("usage", 24 * hour, 0, ""),
        ("correction", 0, 240_000_000, "priced_late"),
        ("correction", -12 * hour, -120_000_000, "ended_earlier"),
    ]
    assert reconcile().ledger_differences == []


def test_a_late_price_gives_money_for_the_hours_that_are_left() -> None:
    """Booked without a price, ended at noon as it turned out later, and only then priced at 10."""
    w = world()
    span = w.lease(at("2026-05-01T00:00"))
    with set_clock(at("2026-05-02T01:00")):
        ledger_accrue()
    w.close(span, at("2026-05-01T12:00"))
    with set_clock(at("2026-05-02T02:00")):
        rate_set(
            acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=10_000_000, valid_from=at("2026-05-01T00:00"),
        )  # fmt: skip
    total = LedgerEntry.objects.aggregate(h=Sum("gpu_ms"), m=Sum("amount_micro"))
    assert total == {"h": 12 * 3_600_000, "m": 120_000_000}
    assert not Incident.objects.filter(kind="price_missing", closed_at=None).exists()


def test_what_a_person_took_back_is_not_taken_back_twice() -> None:
    """20 of 24 hours and 200 of 240 by hand; then the lease ends at noon: 4 hours and 40 are left to take."""
    w = world()
    w.price("10", at("2026-05-01T00:00"))
    span = w.lease(at("2026-05-01T00:00"))
    hour = 3_600_000
    with set_clock(at("2026-05-02T01:00")):
        ledger_accrue()
        line = LedgerEntry.objects.get()
        correction_book(
            acting_user=SYSTEM, entry_uid=line.uid, gpu_ms=-20 * hour, amount_micro=-200_000_000, reason="broken"
        )  # fmt: skip
    w.close(span, at("2026-05-01T12:00"))
    rows = list(LedgerEntry.objects.order_by("id").values_list("gpu_ms", "amount_micro", "reason"))
    assert rows[2:] == [
        (-12 * hour, -120_000_000, "ended_earlier"), (8 * hour, 80_000_000, "taken_back_twice"),
    ]  # fmt: skip
    assert (sum(r[0] for r in rows), sum(r[1] for r in rows)) == (0, 0)
    assert reconcile().ledger_differences == []
