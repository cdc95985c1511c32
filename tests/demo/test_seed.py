"""The first stage makes a working organisation; lives of the past leave no trace in the present but history."""

from __future__ import annotations

import json
import stat
from itertools import combinations
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db.models import Sum

from pool.models import AgentCommand, Gpu, Lease, LeaseSpan, Node
from pool.services.cycle import schedule_cycle
from portal.accounts.models import Department, User
from portal.demo.first import anchor, seed
from portal.demo.lives import Stage, play
from portal.demo.story import Life, story
from portal.demo.telemetry import tracks, write_hours
from portal.ops.models import OutboxEvent
from quotas.models import ApprovalStep, CapacityRequest, LedgerEntry, QuotaUsage
from quotas.services.reconcile import reconcile

pytestmark = pytest.mark.django_db(transaction=True)  # a scheduling cycle commits placement by placement


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    assert seed(tmp_path)
    return tmp_path


def test_the_first_stage_is_made_once_and_tells_its_sign_ins(demo: Path) -> None:
    assert not seed(demo)
    assert (Node.objects.count(), Gpu.objects.count()) == (12, 64)
    assert Node.objects.filter(simulated=True, health="ok").count() == 12
    assert Department.objects.count() == 12
    lines = (demo / "sign-ins.txt").read_text().splitlines()
    name, password = lines[0].split()[:2]
    assert User.objects.get(username=name).check_password(password)
    assert User.objects.count() == 25
    fleet = demo / "demo-fleet.json"
    assert stat.S_IMODE(fleet.stat().st_mode) == 0o600
    assert len(json.loads(fleet.read_text())["nodes"]) == 12
    assert CapacityRequest.objects.filter(state="queued").count() >= 4
    assert ApprovalStep.objects.filter(state="open").count() >= 2


def neighbours(lives: list[Life], shape: str) -> tuple[Life, Life]:
    """Two lives of a shape on one card at one time, the one that ends first written last; in a few hours of the
    week the story has no such two halves: any two then.
    """
    of_shape = [life for life in lives if life.shape == shape]
    pairs = (
        (one, other)
        for one, other in combinations(of_shape, 2)
        if one.seats[0].card == other.seats[0].card and other.started_at < other.ended_at < one.ended_at
    )
    return next(pairs, (of_shape[0], of_shape[1]))


def test_lives_go_through_the_services_and_leave_the_present_alone(demo: Path) -> None:
    schedule_cycle(cause="test")
    held = Lease.objects.filter(ended_at=None).count()
    assert held > 0
    before = list(QuotaUsage.objects.order_by("id").values_list("id", "total", "direct", "charged"))
    events = OutboxEvent.objects.filter(done_at=None).count()
    stage = Stage.load(anchor())
    lives = story(stage.anchor)
    chosen = [*lives[:4], *neighbours(lives, "mig"), *neighbours(lives, "fraction"), *lives[-3:]]
    assert [play(life, stage) for life in chosen] == [""] * len(chosen)
    made = CapacityRequest.objects.filter(client_token__startswith="demo-0")
    assert made.count() == len({life.token for life in chosen})
    assert set(made.values_list("state", flat=True)) == {"ended"}
    assert Lease.objects.filter(ended_at=None).count() == held
    assert not LeaseSpan.objects.filter(during__isempty=True).exists()
    began = Lease.objects.values_list("allocation__request__client_token", "started_at")
    assert set(began.filter(allocation__request__in=made)) == {(x.token, x.started_at) for x in chosen}
    assert list(QuotaUsage.objects.order_by("id").values_list("id", "total", "direct", "charged")) == before
    assert OutboxEvent.objects.filter(done_at=None).count() == events
    assert not AgentCommand.objects.filter(
        allocation__request__client_token__startswith="demo-0", acked_at=None
    ).exists()
    booked = LedgerEntry.objects.aggregate(m=Sum("amount_micro"))["m"]
    assert booked > 0
    assert reconcile().differences == 0
    assert [play(life, stage) for life in chosen] == [""] * len(chosen)
    assert LedgerEntry.objects.aggregate(m=Sum("amount_micro"))["m"] == booked


def test_hourly_rollups_are_written_once(demo: Path) -> None:
    from monitoring.models import GpuRollup

    found = tracks(story(anchor()))[:2]
    write_hours(found, anchor())
    rows = GpuRollup.objects.filter(step=3600).count()
    assert rows == 2 * 90 * 24
    write_hours(found, anchor())
    assert GpuRollup.objects.filter(step=3600).count() == rows
    assert GpuRollup.objects.filter(step=86400).exists()


def test_a_real_database_is_never_filled(settings: object) -> None:
    settings.GPUPOOL_DEMO = False  # type: ignore[attr-defined]
    with pytest.raises(CommandError):
        call_command("demo_seed", "--stage", "first")
