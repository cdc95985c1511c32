"""FOCUS 1.2: the month's lines as rows that the validator finds nothing wrong with, and that add up."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portal.accounts.policy import policy_of
from portal.kernel.clock import set_clock
from portal.kernel.units import MS_PER_HOUR, cost_micro
from portal.ops.actor import SYSTEM
from quotas.engine.focus import HALF_MICRO, mandatory, problems
from quotas.models import LedgerEntry, PriceRate
from quotas.selectors.focus import COLUMNS, focus_rows, hours, money
from quotas.selectors.money import LineFilter, Lines
from quotas.selectors.month_report import month_report
from quotas.services.ledger import ledger_accrue
from quotas.services.months import correction_book, month_close
from quotas.services.surcharges import Idle, idle_surcharges_book
from tests.quotas.money.build import at, person, world


@pytest.mark.django_db
def test_a_month_with_a_price_change_a_correction_and_an_earlier_months_correction() -> None:
    w = world()
    w.price("12.345678", at("2026-05-01T00:00"))
    w.price("15.5", at("2026-06-10T07:13"))
    w.lease(at("2026-05-31T21:17"), at("2026-06-02T03:03"), charge=333)
    w.lease(at("2026-06-09T22:00"), at("2026-06-11T05:00"), site="")
    with set_clock(at("2026-06-12T00:30")):
        ledger_accrue()
        month_close(acting_user=SYSTEM, month=date(2026, 5, 1))
        may = LedgerEntry.objects.get(local_day=date(2026, 5, 31))
        june = LedgerEntry.objects.filter(local_day=date(2026, 6, 1)).first()
        for line in (may, june):
            correction_book(acting_user=SYSTEM, entry_uid=line.uid, gpu_ms=-1000, amount_micro=-7, reason="x")
        lines = Lines(policy_of(person("fin", ("finance", None))), LineFilter(month=date(2026, 6, 1)))
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in focus_rows(lines)]
    assert problems(COLUMNS, rows) == []
    booked = LedgerEntry.objects.filter(booked_month=date(2026, 6, 1)).order_by("id")
    assert [row["x_LedgerEntry"] for row in rows] == [str(line.pk) for line in booked]
    assert sum(Decimal(row["BilledCost"]) for row in rows) * 1_000_000 == sum(
        line.amount_micro for line in booked
    )
    assert {row["BillingPeriodStart"] for row in rows} == {"2026-05-31T16:00:00Z"}
    assert {row["BillingPeriodEnd"] for row in rows} == {"2026-06-30T16:00:00Z"}
    by_class = {row["ChargePeriodStart"]: (row["ChargeCategory"], row["ChargeClass"]) for row in rows[-2:]}
    assert by_class == {
        "2026-05-31T13:17:00Z": ("Usage", "Correction"),
        "2026-05-31T16:00:00Z": ("Adjustment", ""),
    }
    whole = [row for row in rows if row["ChargePeriodStart"] == "2026-06-09T23:13:00Z"]
    assert [(row["ListUnitPrice"], row["PricingUnit"]) for row in whole] == [("15.500000", "GPU-Hours")]


@pytest.mark.django_db
def test_use_and_idle_hours_that_arrive_after_the_close_correct_the_closed_month() -> None:
    w = world()
    w.price("10", at("2026-05-01T00:00"))
    PriceRate.objects.update(idle_micro_per_gpu_hour=4_000_000)
    may, june = date(2026, 5, 1), date(2026, 6, 1)
    with set_clock(at("2026-06-01T00:30")):
        span = w.lease(at("2026-05-31T10:00"), at("2026-05-31T12:00"))
        closed = month_close(acting_user=SYSTEM, month=may).totals
    with set_clock(at("2026-06-02T09:00")):
        w.lease(at("2026-05-30T10:00"), at("2026-05-30T11:00"))  # its news came late
        assert idle_surcharges_book([Idle(span.pk, date(2026, 5, 31), MS_PER_HOUR)]) == 1
        lines = Lines(policy_of(person("fin", ("finance", None))), LineFilter(month=june))
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in focus_rows(lines)]
        shown = month_report(lines.policy, LineFilter(month=june), "department")
    booked = LedgerEntry.objects.filter(booked_month=june).order_by("id")
    assert list(booked.values_list("kind", "local_day", "amount_micro")) == [
        ("usage", date(2026, 5, 30), 10_000_000),
        ("idle", date(2026, 5, 31), 4_000_000),
    ]
    assert problems(COLUMNS, rows) == []
    assert [(row["ChargeClass"], row["ChargeCategory"], row["BilledCost"]) for row in rows] == [
        ("Correction", "Usage", "10.000000"),
        ("Correction", "Usage", "4.000000"),
    ]
    assert (shown.outside.amount_micro, shown.outside.lines) == (14_000_000, 2)
    assert closed["amount_micro"] == sum(
        LedgerEntry.objects.filter(booked_month=may).values_list("amount_micro", flat=True)
    )


def valid_row() -> dict[str, str]:
    return {
        "BilledCost": "3.000000", "BillingAccountId": "a", "BillingAccountName": "A", "BillingCurrency": "CNY",
        "BillingPeriodEnd": "2026-06-30T16:00:00Z", "BillingPeriodStart": "2026-05-31T16:00:00Z",
        "ChargeCategory": "Usage", "ChargeClass": "", "ChargeDescription": "x",
        "ChargePeriodEnd": "2026-06-01T01:00:00Z", "ChargePeriodStart": "2026-06-01T00:00:00Z",
        "ContractedCost": "3.000000", "EffectiveCost": "3.000000", "InvoiceIssuerName": "A", "ListCost": "3.000000",
        "PricingQuantity": "1.5", "PricingUnit": "GPU-Hours", "ProviderName": "A", "PublisherName": "A",
        "ServiceCategory": "Compute", "ServiceName": "GPU", "ListUnitPrice": "2.000000",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("BilledCost", "", "null"),
        ("BilledCost", "1e5", "not a decimal"),
        ("BilledCost", "1,000.00", "not a decimal"),
        ("BillingCurrency", "yuan", "not a currency code"),
        ("BillingPeriodEnd", "2026-06-30T16:00:00+08:00", "not a UTC time"),
        ("ChargePeriodEnd", "2026-06-01T00:00:00Z", "not after its start"),
        ("ChargeCategory", "Use", "not an allowed value"),
        ("ChargeClass", "Fix", "not an allowed value"),
        ("ServiceCategory", "GPUs", "not an allowed value"),
        ("PricingQuantity", "", "null"),
        ("ListCost", "3.000001", "not price × quantity"),
        ("ListUnitPrice", "-2", "below 0"),
        ("Tags", "[1]", "not a JSON object"),
    ],
)
def test_the_validator_finds_each_kind_of_wrong(column: str, value: str, rule: str) -> None:
    row = valid_row()
    assert problems(row, [row]) == []
    row[column] = value
    assert (column, rule) in {(p.column, p.rule) for p in problems(row, [row])}


def test_all_21_mandatory_columns_are_missed_when_they_lack() -> None:
    assert len(mandatory()) == 21
    assert [p.column for p in problems([], [])] == mandatory()
    assert [p.rule for p in problems([*mandatory(), "Surprise"], [])] == ["unknown"]
    assert problems([*mandatory(), "x_Ours"], []) == []


@given(gpu_ms=st.integers(0, 86_400_000 * 366), price=st.integers(0, 10**12))
def test_quantity_times_price_is_the_cost_for_any_line(gpu_ms: int, price: int) -> None:
    cost = Decimal(money(cost_micro(gpu_ms, price)))
    assert abs(Decimal(hours(gpu_ms)) * Decimal(money(price)) - cost) <= HALF_MICRO + Decimal(
        "1e-6"
    ) * Decimal("1e-3")


def test_a_cost_that_lies_half_way_is_rounded_up_and_valid() -> None:
    """3,101,840 ms at 12.9375: 11.1472375 exactly, 11.147238 booked; the quantity is rounded and so the product."""
    gpu_ms, price = 3_101_840, 12_937_500
    cost = cost_micro(gpu_ms, price)
    assert cost == 11_147_238
    row = {"ListCost": money(cost), "ListUnitPrice": money(price), "PricingQuantity": hours(gpu_ms)}
    row |= {"ContractedCost": money(cost), "ContractedUnitPrice": money(price)}
    found = [p for p in problems(row, [row]) if p.rule == "not price × quantity"]
    assert found == []
    row["ListCost"] = money(cost + 1)
    found = [p for p in problems(row, [row]) if p.rule == "not price × quantity"]
    assert [p.column for p in found] == ["ListCost"]
