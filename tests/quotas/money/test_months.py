"""Month close, late bookings, corrections by hand, prices, and the nightly comparison."""

from __future__ import annotations

from datetime import date

import pytest
from django.db import connection
from django.db.models import Sum

from portal.kernel.clock import set_clock
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.kernel.units import MS_PER_HOUR
from portal.ops.actor import SYSTEM, Actor
from portal.ops.models import AuditEvent, Incident
from quotas.models import LedgerEntry, LedgerMonth, PriceRate
from quotas.services.ledger import ledger_accrue
from quotas.services.months import correction_book, month_checks, month_close
from quotas.services.prices import rate_set
from quotas.services.reconcile import reconcile
from tests.quotas.money.build import World, at, person, world

pytestmark = pytest.mark.django_db
MAY, JUNE = date(2026, 5, 1), date(2026, 6, 1)


def worked() -> World:
    w = world()
    w.price("16", at("2026-05-01"))
    w.lease(at("2026-05-10 10:00"), at("2026-05-10 12:00"))
    return w


def close(moment: str, month: date, actor: Actor = SYSTEM) -> LedgerMonth:
    with set_clock(at(moment)):
        return month_close(acting_user=actor, month=month)


def test_a_closed_month_keeps_its_totals_and_late_lines_go_into_a_later_one() -> None:
    w = worked()
    row = close("2026-06-01 09:00", MAY)
    assert row.totals["amount_micro"] == 32_000_000
    w.lease(at("2026-05-20 10:00"))  # told late: nobody knew of it when May was closed
    span = w.lease(at("2026-05-31 23:00"))
    with set_clock(at("2026-06-02 10:00")):
        ledger_accrue()
    w.close(span, at("2026-06-02 10:00"))
    may = LedgerEntry.objects.filter(booked_month=MAY).aggregate(m=Sum("amount_micro"))["m"]
    assert may == row.totals["amount_micro"]
    late = LedgerEntry.objects.filter(booked_month=JUNE, local_day__lt=JUNE)
    assert late.count() == 13
    assert {e.kind for e in late} == {"usage"}


def test_a_month_closes_once_in_order_and_only_when_it_is_over_and_clean() -> None:
    w = worked()
    w.lease(at("2026-06-03 10:00"), at("2026-06-03 12:00"))
    with pytest.raises(Conflict) as caught:
        close("2026-05-31 23:00", MAY)
    assert caught.value.extra["checks"] == ["month_over"]
    with pytest.raises(Conflict) as caught:
        close("2026-07-01 09:00", JUNE)
    assert caught.value.extra["checks"] == ["in_order"]
    close("2026-07-01 09:00", MAY)
    with pytest.raises(Conflict, match="month_closed"):
        close("2026-07-01 09:00", MAY)
    close("2026-07-01 09:00", JUNE)
    assert AuditEvent.objects.filter(action="month.closed").count() == 2


def test_an_open_span_must_be_booked_first_and_a_missing_price_blocks() -> None:
    w = world()
    w.lease(at("2026-05-30 10:00"))
    with set_clock(at("2026-06-01 09:00")):
        w.counter(w.vision, 1000)
        assert [c.code for c in month_checks(month=MAY) if not c.ok] == ["all_booked"]
        ledger_accrue()
        assert [c.code for c in month_checks(month=MAY) if not c.ok] == ["priced", "no_incident"]
    w.price("16", at("2026-05-01"))
    with set_clock(at("2026-06-01 09:10")):
        assert [c.code for c in month_checks(month=MAY) if not c.ok] == []


def test_only_finance_of_the_installation_closes_corrects_and_prices() -> None:
    w = worked()
    entry = LedgerEntry.objects.get()
    for roles in ([("lead", w.root)], [("finance", w.vision)], [("pool_admin", None)], [("auditor", None)]):
        actor = Actor(user=person(f"p{len(roles)}{roles[0][0]}", *roles), via="page")
        with pytest.raises(Refused):
            close("2026-06-01 09:00", MAY, actor)
        with pytest.raises(Refused):
            correction_book(acting_user=actor, entry_uid=entry.uid, gpu_ms=0, amount_micro=-1, reason="x")
        with pytest.raises(Refused):
            rate_set(acting_user=actor, flavour=w.flavour, micro_per_gpu_hour=1, valid_from=at("2027-01-01"))
    assert LedgerEntry.objects.count() == 1
    assert PriceRate.objects.count() == 1
    assert (
        close(
            "2026-06-01 09:00", MAY, Actor(user=person("sun", ("finance", None)), via="page")
        ).closed_by_name
        == "sun"
    )


def test_a_correction_never_takes_back_more_than_the_line_holds() -> None:
    worked()
    entry = LedgerEntry.objects.get()
    book = {"acting_user": SYSTEM, "entry_uid": entry.uid, "reason": "XID 79 at 11:20"}
    with pytest.raises(Invalid):
        correction_book(**book, gpu_ms=-3 * MS_PER_HOUR, amount_micro=0)
    correction_book(**book, gpu_ms=-MS_PER_HOUR, amount_micro=-16_000_000)
    with pytest.raises(Invalid):
        correction_book(**book, gpu_ms=-2 * MS_PER_HOUR, amount_micro=0)
    with pytest.raises(Invalid):
        correction_book(**(book | {"reason": " "}), gpu_ms=-1, amount_micro=0)
    assert LedgerEntry.objects.aggregate(m=Sum("amount_micro"))["m"] == 16_000_000


@pytest.mark.parametrize("amount", [-1, 10**15])
def test_a_price_must_make_sense(amount: int) -> None:
    w = world()
    with pytest.raises(Invalid):
        rate_set(
            acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=amount, valid_from=at("2027-01-01")
        )


def test_a_price_in_the_booked_past_is_refused_and_one_between_two_fits() -> None:
    w = worked()
    with set_clock(at("2026-05-11 10:00")), pytest.raises(Conflict, match="rate_already_booked"):
        rate_set(
            acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=1, valid_from=at("2026-05-10 11:00")
        )
    with set_clock(at("2026-05-11 10:00")):
        rate_set(acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=3, valid_from=at("2026-07-01"))
        rate_set(acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=2, valid_from=at("2026-06-01"))
        with pytest.raises(Conflict, match="rate_starts_then"):
            rate_set(acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=2, valid_from=at("2026-06-01"))
    spans = [(r.during.lower, r.during.upper) for r in PriceRate.objects.order_by("during")]
    assert spans == [
        (at("2026-05-01"), at("2026-06-01")),
        (at("2026-06-01"), at("2026-07-01")),
        (at("2026-07-01"), None),
    ]


def test_reconcile_names_what_differs_and_mends_nothing() -> None:
    w = worked()
    w.lease(at("2026-06-10 10:00"))
    w.counter(w.vision, 1000)
    assert reconcile().differences == 0
    w.counter(w.vision, 500)
    with connection.cursor() as cursor:  # a line nobody can explain
        cursor.execute(
            "UPDATE quotas_usagespan SET ended_at = ended_at + interval '1 hour' WHERE ended_at IS NOT NULL"
        )
    found = reconcile()
    assert {d["department"] for d in found.counter_differences} == {"lab", "vision"}
    assert (
        found.ledger_differences[0]["lease_gpu_ms"] - found.ledger_differences[0]["ledger_gpu_ms"]
        == MS_PER_HOUR
    )
    assert set(Incident.objects.filter(state="open").values_list("kind", flat=True)) == {
        "counters_differ",
        "ledger_differs",
    }
    w.counter(w.vision, -500)
    reconcile()
    assert set(Incident.objects.filter(state="open").values_list("kind", flat=True)) == {"ledger_differs"}
