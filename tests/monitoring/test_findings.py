"""Waste findings end to end: found once, counted exactly, closed with what became of it; who is told, who may act."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from psycopg.types.range import TimestamptzRange

from monitoring.engine.waste import Rules
from monitoring.models import Finding, FindingDay, FindingEntry, GpuRollup, GpuState, NodeState, WatchHour
from monitoring.selectors.findings import Period, before_and_after, findings_visible, kind_sums
from monitoring.services.finding_acts import acts_of, finding_act
from monitoring.services.findings import findings_sweep
from monitoring.services.waste_digest import digest_send
from monitoring.services.watching import pcie_full, watch_look
from monitoring.web.finding_words import evidence_words
from pool.models import Allocation, Gpu, IdleWatch, Lease, MigSlice
from portal.accounts.models import Role
from portal.accounts.policy import policy_of
from portal.kernel.clock import now, set_clock
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.notify.models import Notification
from portal.notify.texts import reading_as, words_of
from portal.ops.actor import Actor
from portal.ops.models import AuditEvent, Incident
from quotas.models import CapacityRequest, FlavourCapacity, GpuFlavour, PriceRate, QuotaGrant
from tests.monitoring import builders as make

pytestmark = pytest.mark.django_db
T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)  # Tuesday, 14:00 in Shanghai
HOUR_MS = 3_600_000


def at(hours: float) -> set_clock:
    return set_clock(T + timedelta(hours=hours))


def person(*values: Any) -> Any:
    """A person whose role holds since before the tests' time."""
    with at(-30 * 24):
        return make.person(*values)


@pytest.fixture
def team() -> Any:
    return make.department("vision")


@pytest.fixture
def wu(team: Any) -> Any:
    return person("wu", Role.RESEARCHER, team)


def priced(card: Gpu, amount: int = 10) -> None:
    PriceRate.objects.create(
        flavour=card.flavour,
        micro_per_gpu_hour=amount * 1_000_000,
        during=TimestamptzRange(T - timedelta(days=30), None),
    )


def lease_of(card: Gpu, holder: Any, team: Any, hours: float = 3) -> Lease:
    """A card that has been held for so long; its allocation runs."""
    return make.held(card, holder, team, since=now() - timedelta(hours=hours))


def idle(lease: Lease, hours: float, **more: Any) -> None:
    IdleWatch.objects.update_or_create(
        allocation=lease.allocation,
        defaults={
            "state": "idle",
            "idle_since": now() - timedelta(hours=hours),
            "evidence": {"cards": 1},
            **more,
        },
    )


def rollups(card: Gpu, hours: int, *, level: int, memory: int, sm: bool = True, covered: int = 3600) -> None:
    """The last full hours of a card, each at one level."""
    end = now().replace(minute=0, second=0, microsecond=0)
    n = covered // 10
    GpuRollup.objects.bulk_create(
        GpuRollup(
            gpu_id=card.pk, slot=0, step=3600, bucket=end - timedelta(hours=k + 1), samples=n, covered_s=covered,
            util_n=n, util_sum=n * level, util_max=level, sm_n=n if sm else 0, sm_sum=n * level if sm else 0,
            mem_n=n, mem_sum=n * memory, mem_max=memory,
        )
        for k in range(hours)
    )  # fmt: skip


def test_idle_work_is_found_once_and_its_hours_and_money_grow_exactly(team: Any, wu: Any) -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        priced(card)
        lease = lease_of(card, wu, team, 5)
        idle(lease, 2)
        assert findings_sweep() == {"opened": 1, "kept": 0, "closed": 0}
        assert findings_sweep() == {"opened": 0, "kept": 1, "closed": 0}
    row = Finding.objects.get()
    assert (row.kind, row.state, row.waste_milli, row.confidence) == ("idle", "open", 1000, "high")
    assert (row.gpu_ms, row.micro) == (2 * HOUR_MS, 20_000_000)
    assert (row.holder, row.department) == (wu, team)
    with at(12):  # two in the morning of the next day in Shanghai
        findings_sweep()
        row.refresh_from_db()
    assert (row.gpu_ms, row.micro) == (14 * HOUR_MS, 140_000_000)
    days = list(FindingDay.objects.order_by("local_day").values_list("local_day", "gpu_ms", "micro"))
    assert [(str(day), ms, micro) for day, ms, micro in days] == [
        ("2026-06-16", 12 * HOUR_MS, 120_000_000),
        ("2026-06-17", 2 * HOUR_MS, 20_000_000),
    ]


def test_a_price_that_changes_meanwhile_counts_from_its_moment(team: Any, wu: Any) -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        change = T - timedelta(hours=1)
        for amount, during in ((10, (T - timedelta(days=9), change)), (30, (change, None))):
            PriceRate.objects.create(
                flavour=card.flavour, micro_per_gpu_hour=amount * 1_000_000, during=TimestamptzRange(*during)
            )
        idle(lease_of(card, wu, team, 5), 3)
        findings_sweep()
    assert Finding.objects.get().micro == (2 * 10 + 1 * 30) * 1_000_000


@pytest.mark.parametrize(
    ("change", "outcome"),
    [("busy", "used"), ("unknown", "unknown"), ("ended", "ended"), ("reclaimed", "reclaimed")],
)
def test_a_finding_closes_with_what_became_of_it(team: Any, wu: Any, change: str, outcome: str) -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        lease = lease_of(card, wu, team, 5)
        idle(lease, 2)
        findings_sweep()
    with at(1):
        if change in ("busy", "unknown"):
            IdleWatch.objects.update(state=change, idle_since=None)
        else:
            reason = "finished" if change == "ended" else "idle"
            Allocation.objects.update(state="ended", end_reason=reason, ended_at=now())
            Lease.objects.update(ended_at=now())
        assert findings_sweep() == {"opened": 0, "kept": 0, "closed": 1}
    row = Finding.objects.get()
    assert (row.state, row.outcome, row.gpu_ms) == ("closed", outcome, 2 * HOUR_MS)
    assert list(row.entries.order_by("id").values_list("kind", flat=True)) == ["found", "closed"]


def test_idle_again_is_a_new_finding_that_counts_nothing_twice(team: Any, wu: Any) -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        lease = lease_of(card, wu, team, 5)
        idle(lease, 2)
        findings_sweep()
        IdleWatch.objects.update(state="unknown")
        findings_sweep()
    with at(1):
        idle(lease, 3)  # since the same moment as before
        findings_sweep()
    first, second = Finding.objects.order_by("id")
    assert second.since == first.seen_at
    assert (first.gpu_ms, second.gpu_ms) == (2 * HOUR_MS, 1 * HOUR_MS)


def test_still_needed_is_shown_and_not_counted(team: Any, wu: Any) -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        idle(lease_of(card, wu, team, 5), 2, excused_until=T + timedelta(hours=4), excuses=1)
        findings_sweep()
        row = Finding.objects.get()
        assert (row.gpu_ms, row.evidence["excuses"]) == (0, 1)
    with at(5):
        findings_sweep()
        row.refresh_from_db()
        assert row.gpu_ms == 5 * HOUR_MS  # what passed since it was last looked at


def test_idle_for_less_than_the_rules_say_is_no_finding(team: Any, wu: Any) -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        idle(lease_of(card, wu, team, 5), 0.9)
        assert findings_sweep()["opened"] == 0


def test_cards_that_did_nothing_beside_others_are_over_asked(team: Any, wu: Any) -> None:
    with at(0.5):
        cards = list(make.node(gpus=3).gpus.order_by("index"))
        lease = lease_of(cards[0], wu, team, 30.5)
        for card in cards[1:]:
            Lease.objects.create(
                allocation=lease.allocation, gpu=card, charge=1000, started_at=lease.started_at
            )
        rollups(cards[0], 30, level=820, memory=60_000)
        rollups(cards[1], 30, level=790, memory=60_000)
        rollups(cards[2], 30, level=0, memory=500)
        findings_sweep()
    row = Finding.objects.get()
    assert (row.kind, row.rule, row.waste_milli, row.evidence["which"]) == (
        "over_asked", "count", 1000, ["sh-h800-01/2"],
    )  # fmt: skip
    assert row.evidence["hours"] == 30


def test_a_part_of_a_card_would_do(team: Any, wu: Any) -> None:
    with at(0.5):
        [card] = make.node(gpus=1).gpus.all()
        lease_of(card, wu, team, 30.5)
        rollups(card, 30, level=150, memory=7_000)
        findings_sweep()
    row = Finding.objects.get()
    assert (row.kind, row.rule, row.evidence["part"], row.waste_milli) == ("over_asked", "part", "200", 800)


def flavour_on_offer(code: str, memory_mib: int, price: int, **more: Any) -> Any:
    made = GpuFlavour.objects.create(code=code, name=code.upper(), memory_mib=memory_mib, **more)
    FlavourCapacity.objects.create(
        flavour=made, installed_milli=16_000, healthy_milli=16_000, largest_node_gpus=8, updated_at=now()
    )
    PriceRate.objects.create(
        flavour=made,
        micro_per_gpu_hour=price * 1_000_000,
        during=TimestamptzRange(T - timedelta(days=30), None),
    )
    return made


def test_a_cheaper_flavour_would_do_at_the_prices_of_the_department(team: Any, wu: Any) -> None:
    with at(0.5):
        [card] = make.node(gpus=1).gpus.all()
        priced(card, 20)
        other = flavour_on_offer("a100-64g", 65_536, 10)
        PriceRate.objects.create(
            flavour=other,
            department=team,
            micro_per_gpu_hour=8_000_000,
            during=TimestamptzRange(T - timedelta(days=30), None),
        )
        lease_of(card, wu, team, 30.5)
        rollups(card, 30, level=300, memory=42_000)
        findings_sweep()
        row = Finding.objects.get()
        assert (row.kind, row.rule, row.waste_milli, row.confidence) == (
            "over_asked",
            "flavour",
            600,
            "medium",
        )
        assert (row.evidence["flavour"], row.evidence["price"], row.evidence["flavour_price"]) == (
            "A100-64G", 20_000_000, 8_000_000,
        )  # fmt: skip
        # since the begin of 30 full hours, which is 30.5 h ago: what 12 of 20 an hour come to
        assert (row.gpu_ms, row.micro) == (65_880_000, 366_000_000)
        words = evidence_words(row.kind, row.rule, row.evidence)
        assert "A100-64G" in words and "75" in words
        finding_act(**acting(person("chief", Role.POOL_ADMIN)), finding=row, act="tell")
        notice = Notification.objects.get(user=wu, kind="monitoring.finding")
        assert "A100-64G" in words_of(notice).body


@pytest.mark.parametrize(
    ("request_", "flavour"),
    [
        ({"requirement": {"fp8": True}}, {}),
        ({"requirement": {"memory_mib": 80_000}}, {}),
        ({"requirement": {"models": ["H800-SXM5-80GB"]}}, {}),
        ({"requirement": {"nvlink": True}}, {}),
        ({"fabric": "infiniband"}, {}),
        ({"domain_required": "rack"}, {}),
        ({}, {"active": False}),
        ({}, {"memory_mib": 40_000}),
        ({"nodes": 17}, {}),
    ],
)
def test_what_a_request_rests_on_rules_a_cheaper_flavour_out(
    team: Any, wu: Any, request_: dict[str, Any], flavour: dict[str, Any]
) -> None:
    with at(0.5):
        [card] = make.node(gpus=1).gpus.all()
        priced(card, 20)
        other = flavour_on_offer("a100-64g", 65_536, 8)
        GpuFlavour.objects.filter(pk=other.pk).update(**flavour or {"position": 1})
        lease = lease_of(card, wu, team, 30.5)
        CapacityRequest.objects.filter(pk=lease.allocation.request_id).update(**request_ or {"priority": 50})
        rollups(card, 30, level=300, memory=42_000)
        assert findings_sweep()["opened"] == 0


def test_a_flavour_that_the_department_may_not_have_is_not_proposed(team: Any, wu: Any) -> None:
    with at(0.5):
        [card] = make.node(gpus=1).gpus.all()
        priced(card, 20)
        other = flavour_on_offer("a100-64g", 65_536, 8)
        grant = QuotaGrant.objects.create(
            department=team, flavour=other, hard_cap=0, during=TimestamptzRange(T - timedelta(days=1), None)
        )
        lease_of(card, wu, team, 30.5)
        rollups(card, 30, level=300, memory=42_000)
        assert findings_sweep()["opened"] == 0
        grant.delete()
        assert findings_sweep()["opened"] == 1


def test_little_telemetry_concludes_nothing(team: Any, wu: Any) -> None:
    with at(0.5):
        [card] = make.node(gpus=1).gpus.all()
        lease_of(card, wu, team, 30.5)
        rollups(card, 30, level=150, memory=7_000, covered=2400)
        assert findings_sweep()["opened"] == 0


def seen(card: Gpu, *, activity: int, throttle: int = 0, clock: int = 1980, **host: int) -> None:
    GpuState.objects.update_or_create(
        gpu=card,
        slot=0,
        defaults={"at": now() - timedelta(seconds=3), "util_pm": activity, "sm_pm": activity, "throttle": throttle,
                  "sm_clock_mhz": clock, "temp_c": 84},
    )  # fmt: skip
    if host:
        NodeState.objects.update_or_create(node=card.node, defaults={"at": now(), **host})


def test_a_host_that_waits_for_input_makes_a_card_wait_for_data(team: Any, wu: Any) -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        lease_of(card, wu, team, 5)
    rules = Rules(wait_least_looks=20)
    for minute in range(20):
        with at(minute / 60):
            seen(card, activity=200, cpu_pm=300, iowait_pm=400 if minute % 2 else 10)
            assert watch_look() == 1
            assert watch_look() == 0  # the same sample counts once
    with at(1):
        assert findings_sweep()["opened"] == 0  # too few looks for the ordinary rules
        findings_sweep(rules=rules)
    row = Finding.objects.get()
    assert (row.kind, row.rule, row.waste_milli) == (
        "waiting_data",
        "io",
        400,
    )  # half of the looks, four fifths undone
    assert (row.evidence["looks"], row.evidence["waits"]) == (20, 10)
    assert WatchHour.objects.count() == 2  # samples three seconds before the hour belong to it


def test_heat_is_told_for_the_card(team: Any, wu: Any) -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        lease_of(card, wu, team, 5)
    for minute in range(40):
        with at(minute / 60):
            seen(card, activity=900, throttle=0x40 if minute < 20 else 0, clock=1485 if minute < 20 else 1980)
            watch_look()
    with at(1):
        findings_sweep()
    row = Finding.objects.get()
    assert (row.kind, row.rule, row.gpu, row.waste_milli) == ("throttled", "heat", card, 125)


def test_old_samples_are_not_looked_at(team: Any, wu: Any) -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        lease_of(card, wu, team, 5)
        seen(card, activity=200)
        GpuState.objects.update(at=now() - timedelta(minutes=2))
        assert watch_look() == 0


def test_a_bus_is_full_by_what_its_present_link_carries() -> None:
    gen4 = {"pcie_gen": 4, "pcie_width": 16}
    assert pcie_full({**gen4, "pcie_rx_kib_s": 26_000_000}) is True
    assert pcie_full({**gen4, "pcie_rx_kib_s": 20_000_000}) is False
    assert pcie_full({"pcie_gen": 4, "pcie_width": 8, "pcie_tx_kib_s": 13_000_000}) is True
    assert pcie_full(gen4) is None
    assert pcie_full({"pcie_rx_kib_s": 26_000_000}) is None


def foreign(card: Gpu, hours: float = 2) -> None:
    process = {"pid": 71, "name": "python3", "user": "tan", "mem_mib": 40960}
    card.foreign_use = [{**process, "since": (now() - timedelta(hours=hours)).isoformat()}]
    card.save()


def test_use_without_a_lease_names_process_and_user(team: Any) -> None:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        priced(card)
        foreign(card)
        findings_sweep()
        row = Finding.objects.get()
    assert (row.kind, row.holder, row.gpu_ms, row.micro) == ("no_lease", None, 2 * HOUR_MS, 20_000_000)
    assert row.evidence["processes"] == [{"pid": 71, "name": "python3", "user": "tan", "mem_mib": 40960}]
    assert row.evidence["users"] == ["tan"]


def test_a_layout_strands_only_what_no_instance_could_take() -> None:
    with at(0):
        [card] = make.node(gpus=1, model="NVIDIA H800").gpus.all()
        flavour = card.flavour
        flavour.mig_table, flavour.mig_capable, flavour.compute_slices, flavour.memory_slices = (
            "H100 80GB",
            True,
            7,
            8,
        )
        from monitoring.selectors.waste_evidence import table_of

        card.mig_enabled = True
        card.save()
        table = table_of(card) or pytest.fail("the card has a table of profiles")
        three = next(p for p in table.profiles if p.name == "3g.40gb")
        for instance, start in enumerate(three.starts[:2]):
            MigSlice.objects.create(
                gpu=card, uuid=f"MIG-{instance}", profile="3g.40gb", gpu_instance=instance, start=start,
                size=three.size, compute_slices=3, created_at=now() - timedelta(hours=2),
            )  # fmt: skip
        findings_sweep()
        row = Finding.objects.get()
        assert (row.kind, row.rule, row.waste_milli) == ("stranded", "layout", 143)  # one of seven
        MigSlice.objects.filter(gpu_instance=0).update(gone_at=now())  # now a 4g slice fits beside the other
        assert findings_sweep()["closed"] == 1


def acting(user: Any) -> dict[str, Any]:
    return {"acting_user": Actor(user=user), "policy": policy_of(user)}


@pytest.fixture
def found(team: Any, wu: Any) -> Finding:
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        priced(card)
        idle(lease_of(card, wu, team, 5), 2)
        findings_sweep()
    return Finding.objects.get()


def test_the_holder_is_told_once_in_their_language(found: Finding, team: Any, wu: Any) -> None:
    lead = person("lead", Role.LEAD, team)
    with at(0):
        done = finding_act(**acting(lead), finding=found, act="tell")
        assert done.told_by_name == "Lead"
        with pytest.raises(Conflict, match="told of this already"):
            finding_act(**acting(lead), finding=found, act="tell")
    notice = Notification.objects.get(user=wu, kind="monitoring.finding")
    wu.language = "zh-hans"
    with reading_as(wu):
        words = words_of(notice)
    assert "2.0" in words.body and "¥20.00" in words.body
    assert list(found.entries.order_by("id").values_list("kind", flat=True)) == ["found", "told"]


def test_who_may_act(found: Finding, team: Any, wu: Any) -> None:
    stranger = person("lead2", Role.LEAD, make.department("speech"))
    auditor = person("auditor", Role.AUDITOR)
    for one in (wu, stranger, auditor):
        for act in ("tell", "dismiss", "incident"):
            with pytest.raises(Refused):
                finding_act(**acting(one), finding=found, act=act, reason="no")
    found.refresh_from_db()
    assert (found.state, found.told_at) == ("open", None)
    assert FindingEntry.objects.filter(finding=found).count() == 1
    assert Notification.objects.count() == 0


def test_dismissing_needs_a_reason_and_stops_nothing_else(found: Finding, team: Any) -> None:
    admin = person("admin", Role.POOL_ADMIN)
    with at(1):
        with pytest.raises(Invalid):
            finding_act(**acting(admin), finding=found, act="dismiss", reason="  ")
        assert Finding.objects.get().state == "open"
        finding_act(**acting(admin), finding=found, act="dismiss", reason="A demo tomorrow")
        assert findings_sweep() == {"opened": 0, "kept": 1, "closed": 0}  # the same waste is not found again
        assert Finding.objects.get().state == "dismissed"
        assert kind_sums(policy_of(admin))["idle"].gpu_ms == 0
        finding_act(**acting(admin), finding=found, act="reopen")
        assert kind_sums(policy_of(admin))["idle"].gpu_ms == 3 * HOUR_MS
    audit = AuditEvent.objects.get(action="finding.dismissed")
    assert audit.reason == "A demo tomorrow"


def test_an_account_that_nobody_here_has_cannot_be_told() -> None:
    admin = person("admin", Role.POOL_ADMIN)
    with at(0):
        [card] = make.node(gpus=1).gpus.all()
        foreign(card)
        findings_sweep()
        row = Finding.objects.get()
        with pytest.raises(Conflict, match="No account"):
            finding_act(**acting(admin), finding=row, act="tell")
        tan = person("tan", Role.RESEARCHER, make.department("speech"))
        finding_act(**acting(admin), finding=row, act="tell")
    assert Notification.objects.get().user == tan


def test_an_incident_is_opened_for_a_hot_card_only(found: Finding, team: Any, wu: Any) -> None:
    admin = person("admin", Role.POOL_ADMIN)
    with pytest.raises(Conflict, match="no fault"):
        finding_act(**acting(admin), finding=found, act="incident")
    assert Incident.objects.count() == 0
    Finding.objects.filter(pk=found.pk).update(kind="throttled", rule="heat", gpu=Gpu.objects.get())
    finding_act(**acting(admin), finding=found, act="incident")
    assert Incident.objects.get().kind == "gpu_throttled"


def test_a_layout_that_strands_parts_is_handed_to_operators_and_ends_with_its_finding(
    found: Finding, wu: Any
) -> None:
    admin = person("admin", Role.POOL_ADMIN)
    Finding.objects.filter(pk=found.pk).update(kind="stranded", rule="layout", gpu=Gpu.objects.get())
    row = Finding.objects.get()
    assert acts_of(policy_of(admin), row) == ["incident", "dismiss"]
    assert acts_of(policy_of(wu), row) == []
    finding_act(**acting(admin), finding=row, act="incident")
    incident = Incident.objects.get()
    assert (incident.kind, incident.severity, incident.state) == ("gpu_stranded", "info", "open")
    with at(48):
        findings_sweep()  # nothing strands any more
    assert Finding.objects.get(kind="stranded").state == "closed"
    assert Incident.objects.get().state == "closed"


def test_who_sees_which_findings(found: Finding, team: Any, wu: Any) -> None:
    other = make.department("speech")
    people = {
        "lead": person("lead", Role.LEAD, team),
        "stranger": person("stranger", Role.LEAD, other),
        "finance": person("finance", Role.FINANCE),
    }
    assert [f.pk for f in findings_visible(policy_of(wu))] == [found.pk]
    assert findings_visible(policy_of(people["lead"])).count() == 1
    assert findings_visible(policy_of(people["finance"])).count() == 1
    assert findings_visible(policy_of(people["stranger"])).count() == 0


def test_the_digest_comes_once_a_week_to_who_has_something_to_read(found: Finding, team: Any) -> None:
    lead = person("lead", Role.LEAD, team)
    person("stranger", Role.LEAD, make.department("speech"))
    with at(3 * 24):
        assert digest_send() == 0  # the week is not over: the one before had nothing
    with set_clock(datetime(2026, 6, 21, 23, 0, tzinfo=UTC)):  # Monday, seven in the morning
        assert digest_send() == 0
    with set_clock(datetime(2026, 6, 22, 3, 0, tzinfo=UTC)):
        assert digest_send() == 1
        assert digest_send() == 0
    notice = Notification.objects.get(kind="monitoring.waste_week")
    assert (notice.user, notice.threshold) == (lead, "2026-W25")
    with reading_as(lead):
        words = words_of(notice)
    assert words.title == "Waste in the week from 2026-06-15: 2.0 GPU·h, ¥20.00"
    assert words.body == "1 findings. Held but idle: 2.0 GPU·h, ¥20.00."


def test_before_and_after_are_whole_weeks_on_either_side() -> None:
    days = [datetime(2026, 5, 4, tzinfo=UTC).date() + timedelta(weeks=k) for k in range(6)]
    weeks = [Period(d, d + timedelta(days=6), 1000, 500 + 50 * k, 100) for k, d in enumerate(days)]
    before, after = before_and_after(weeks, datetime(2026, 5, 27, tzinfo=UTC).date())
    assert before is not None and after is not None
    assert (before.first, before.last, before.allocated) == (days[0], weeks[2].last, 1650)
    assert (after.first, after.allocated, after.effective) == (days[4], 1450, 1250)
    assert before_and_after(weeks, datetime(2026, 1, 1, tzinfo=UTC).date())[0] is None


@pytest.fixture
def signed_in() -> Any:
    def client(user: Any) -> Client:
        browser = Client()
        browser.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
        return browser

    return client


def test_P046_the_page_lists_findings_with_evidence_and_one_act(
    found: Finding, team: Any, signed_in: Any, django_assert_max_num_queries: Any
) -> None:
    lead = person("lead", Role.LEAD, team)
    browser = signed_in(lead)
    with at(0):
        with django_assert_max_num_queries(15):
            answer = browser.get(reverse("monitoring:waste"))
        text = answer.content.decode()
        assert answer.status_code == 200
        assert "Activity 0.0\u00a0% and no kernel running for 2\u00a0h on all 1 of its GPUs" in text
        assert "¥20.00" in text and "Ask holder" in text
        done = browser.post(reverse("monitoring:finding-act", args=[found.uid, "tell"]), {"back": "list"})
        assert (done.status_code, done["Location"]) == (302, reverse("monitoring:waste"))
        assert Finding.objects.get().told_at is not None
        assert browser.get(reverse("monitoring:waste"), {"colour": "red"}).status_code == 400
        assert "0 findings" in browser.get(reverse("monitoring:waste"), {"kind": "stranded"}).content.decode()
        file = browser.get(reverse("monitoring:waste-file")).content.decode("utf-8-sig")
        assert f"{found.ref},Held but idle," in file and ",2.000000,20," in file


def test_the_detail_is_for_its_holder_and_readers_only(
    found: Finding, wu: Any, team: Any, signed_in: Any
) -> None:
    address = reverse("monitoring:finding", args=[found.uid])
    with at(0):
        mine = signed_in(wu).get(address).content.decode()
        assert "Still needed…" in mine and "Dismiss" not in mine
        assert signed_in(person("other", Role.RESEARCHER, team)).get(address).status_code == 404
        lead = signed_in(person("lead", Role.LEAD, team))
        kept = lead.post(reverse("monitoring:finding-act", args=[found.uid, "dismiss"]), {"reason": ""})
        assert kept.status_code == 400 and "Say in a sentence why" in kept.content.decode()
        assert signed_in(wu).get(reverse("monitoring:waste")).status_code == 403
    assert Finding.objects.get().state == "open"


def test_the_api_does_what_the_page_does(found: Finding, team: Any, signed_in: Any) -> None:
    lead = signed_in(person("lead", Role.LEAD, team))
    with at(0):
        listed = lead.get("/api/v1/findings/", {"state": "open", "kind": "idle"}).json()
        assert [row["gpu_ms"] for row in listed["results"]] == [2 * HOUR_MS]
        assert lead.get("/api/v1/findings/", {"kind": "nothing"}).status_code == 400
        assert lead.get("/api/v1/findings/", {"colour": "red"}).status_code == 400
        address = f"/api/v1/findings/{found.uid}/"
        one = lead.get(address)
        assert one.json()["acts"] == ["tell", "dismiss"]
        assert one.json()["days"] == [{"local_day": "2026-06-16", "gpu_ms": 2 * HOUR_MS, "micro": 20_000_000}]
        json = {"content_type": "application/json"}
        stale = lead.post(f"{address}act/", {"act": "tell"}, headers={"If-Match": '"7"'}, **json)
        assert (stale.status_code, stale.json()["code"]) == (412, "version_changed")
        unknown = lead.post(f"{address}act/", {"act": "tell", "loud": True}, **json)
        assert unknown.status_code == 400
        assert Finding.objects.get().told_at is None
        told = lead.post(f"{address}act/", {"act": "tell"}, headers={"If-Match": one["ETag"]}, **json)
        assert (told.status_code, told.json()["acts"]) == (200, ["dismiss"])
        refused = lead.post(f"{address}act/", {"act": "dismiss"}, **json)
        assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (400, "reason")
