"""Surcharges for power and for idle hours: a month that can be checked with a pencil, in every form.

Vision holds one card 10 May 00:00 to 11 May 12:00: 36 h at 10.00 + 1.50 for power = 414.00, of it 54.00 for power. On
10 May the card works 12 hours and rests 12; 11 May is unseen. Idle hours cost 4.00 more: 12 h = 48.00, one line, booked
on 14 May. Together 462.00.
"""

from __future__ import annotations

import csv
import io
from datetime import date, timedelta
from decimal import Decimal

import pytest
from django.test import Client
from django.urls import reverse

from monitoring.models import UseDay
from monitoring.selectors.reports.base import ask_from
from monitoring.selectors.reports.kinds import KINDS
from monitoring.services.day_sums import days_sum
from monitoring.services.idle_surcharges import idle_surcharges_sweep
from pool.models import Cluster, Gpu, Node, Site
from portal.accounts.policy import DepartmentTree, policy_of
from portal.kernel.clock import set_clock
from portal.ops.actor import SYSTEM
from quotas.engine.focus import problems
from quotas.models import LedgerEntry, LedgerSum, PriceRate
from quotas.selectors.focus import COLUMNS, focus_rows
from quotas.selectors.money import Lines, line_filter
from quotas.selectors.price_preview import price_preview
from quotas.selectors.prices import rates_now
from quotas.services.ledger import ledger_accrue, ledger_sums_merge
from quotas.services.months import correction_book
from quotas.services.price_import import prices_import
from quotas.services.prices import rate_set
from quotas.services.reconcile import reconcile
from tests.monitoring.reports.story import hour, lease
from tests.quotas.money.build import World, at, named, person, world

pytestmark = pytest.mark.django_db
H, CNY = 3_600_000, 1_000_000
MAY = date(2026, 5, 1)


@pytest.fixture
def w() -> World:
    """The month as it is told above, on 14 May."""
    w = world()
    cluster = Cluster.objects.create(
        code="c1", name="c1", site=Site.objects.create(code="sh", name="Shanghai")
    )
    card = Gpu.objects.create(
        uuid="GPU-0", node=Node.objects.create(name="n1", cluster=cluster, health="ok"), flavour=w.flavour, index=0,
        model_name="NVIDIA H800", memory_mib=81559,
    )  # fmt: skip
    named(w.vision, "Lab / Vision", at("2026-01-01T00:00"))
    with set_clock(at("2026-05-01T00:00")):
        rate_set(
            acting_user=SYSTEM, flavour=w.flavour, micro_per_gpu_hour=10 * CNY, power_micro_per_gpu_hour=1_500_000,
            idle_micro_per_gpu_hour=4 * CNY, list_micro_per_gpu_hour=12 * CNY, valid_from=at("2026-05-01T00:00"),
        )  # fmt: skip
    lease(w, card, w.vision, "2026-05-10T00:00", "2026-05-11T12:00")
    for n in range(24):
        hour(card, at("2026-05-10T00:00") + timedelta(hours=n), 1000 if n < 12 else 0)
    with set_clock(at("2026-05-12T23:00")):
        ledger_accrue()
        days_sum(limit=100)
        assert idle_surcharges_sweep() == 0, "telemetry of 10 May may still change"
    with set_clock(at("2026-05-14T00:30")):
        days_sum(limit=100)
        assert idle_surcharges_sweep() == 1
        assert idle_surcharges_sweep() == 0
        days_sum(limit=100)
        ledger_sums_merge()
    return w


def test_lines_sums_and_days_have_the_surcharges(w: World) -> None:
    lines = LedgerEntry.objects.order_by("starts_at", "id")
    found = lines.values_list("kind", "gpu_ms", "surcharge_ms", "micro_per_gpu_hour", "amount_micro")
    assert list(found) == [
        ("usage", 24 * H, 0, 11_500_000, 276 * CNY),
        ("idle", 0, 12 * H, 4 * CNY, 48 * CNY),
        ("usage", 12 * H, 0, 11_500_000, 138 * CNY),
    ]
    kept = LedgerSum.objects.order_by("local_day", "-gpu_ms")
    assert list(kept.values_list("gpu_ms", "amount_micro", "power_micro")) == [
        (24 * H, 276 * CNY, 36 * CNY), (0, 48 * CNY, 0), (12 * H, 138 * CNY, 18 * CNY),
    ]  # fmt: skip
    day = UseDay.objects.get(local_day=date(2026, 5, 10))
    assert (day.idle_ms, day.amount_micro, day.idle_micro) == (12 * H, 324 * CNY, (138 + 48) * CNY)
    with set_clock(at("2026-05-14T01:00")):
        assert reconcile().differences == 0
    costs = rates_now(None, at=at("2026-05-14T00:00"), site_code="sh", department_id=w.vision.pk)
    assert costs == {w.flavour.pk: 11_500_000}, "an estimate counts power too"


def test_the_report_states_them_apart_and_they_add_up(w: World) -> None:
    with set_clock(at("2026-05-14T01:00")):
        policy = policy_of(person("fin", ("finance", None)))
        kind = KINDS["chargeback"]
        table = kind.make(ask_from(kind, {"period": "2026-05", "by": "flavour"}, policy)).tables[0]
    shown = dict(zip([column.key for column in table.columns], table.rows[0], strict=True))
    assert shown == {
        "group": "H800 80GB", "hours": 36 * H, "usage": 360 * CNY, "power": 54 * CNY, "idle": 48 * CNY,
        "corrections": 0, "charge": 462 * CNY, "share": 10_000, "lines": 3,
    }  # fmt: skip


def test_focus_has_a_valid_row_for_them(w: World) -> None:
    policy = policy_of(person("fin", ("finance", None)))
    rows = [
        dict(zip(COLUMNS, row, strict=True))
        for row in focus_rows(Lines(policy, line_filter({"month": "2026-05"}, policy)))
    ]
    assert problems(COLUMNS, rows) == []
    assert sum(Decimal(row["BilledCost"]) for row in rows) == 462
    assert sum(Decimal(row["x_PowerCost"]) for row in rows) == 54
    assert sum(Decimal(row["ConsumedQuantity"] or 0) for row in rows) == 36, "idle hours are consumed once"
    assert sum(Decimal(row["ListCost"]) for row in rows) == Decimal("36") * Decimal("13.5") + 48
    idle = next(row for row in rows if row["ChargeDescription"].startswith("Idle surcharge"))
    assert (Decimal(idle["PricingQuantity"]), idle["ContractedUnitPrice"]) == (12, "4.000000")


def test_a_preview_counts_power_and_tells_idle(w: World) -> None:
    finance = person("fin", ("finance", None))
    client = Client()
    client.force_login(finance)
    with set_clock(at("2026-06-02T09:00")):
        seen = price_preview(
            flavour=w.flavour, micro_per_gpu_hour=22 * CNY, site="", month=MAY, tree=DepartmentTree.load()
        )
        assert (seen.was, seen.would) == (414 * CNY, 36 * 22 * CNY)
        page = client.post(
            reverse("quotas:prices"),
            {
                "flavour": w.flavour.pk,
                "price": "20",
                "power": "2",
                "idle": "2",
                "reason": "x",
                "preview": "1",
            },
        ).content.decode()
        assert "792.00" in page
        address = f"{reverse('monitoring:report-idle-preview')}?period=2026-05&amp;flavour=H800-80GB&amp;idle=2000000"
        assert address in page
        told = client.get(address.replace("&amp;", "&"), headers={"accept-language": "en"}).content.decode()
    assert "24.00" in told and "12.0" in told


def test_an_idle_line_can_be_corrected_and_a_book_with_surcharges_comes_back(w: World) -> None:
    finance = person("fin", ("finance", None))
    client = Client()
    client.force_login(finance)
    line = LedgerEntry.objects.get(kind="idle")
    with set_clock(at("2026-05-15T09:00")):
        correction = correction_book(
            acting_user=SYSTEM, entry_uid=line.uid, gpu_ms=0, amount_micro=-8 * CNY, reason="was needed"
        )
        file = client.get(reverse("quotas:prices-file"), {"for": "machines"}).content
        rows = prices_import(acting_user=SYSTEM, file=file, reason="back", dry_run=False)
    assert (correction.amount_micro, correction.surcharge_ms) == (-8 * CNY, 0)
    assert [row.new for row in rows] == [False]
    head = next(csv.DictReader(io.StringIO(file.decode())))
    assert (head["power_micro_per_gpu_hour"], head["idle_micro_per_gpu_hour"]) == ("1500000", "4000000")
    assert PriceRate.objects.count() == 1
