"""The Slurm executor on a real Slurm: the conformance suite, and what only Slurm has."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from django.test import Client
from django.urls import reverse

from pool.executors.base import Limit
from pool.executors.slurm.text import fields
from pool.models import Allocation, AllocationLog, AllocationMember, Cluster, Gpu, Lease, Node
from pool.services import stopping
from pool.services.adoption import work_adopt
from pool.services.cycle import schedule_cycle
from pool.services.execution import allocation_start
from pool.services.nodes import node_cordon, node_uncordon
from pool.services.outside_accounts import accounts_compare
from pool.services.outside_limits import limits_diff, limits_push
from pool.services.outside_output import outputs_follow
from portal.kernel.clock import now
from portal.kernel.errors import Blocked, Conflict
from portal.ops.actor import system
from portal.ops.models import Incident
from quotas.models import QuotaGrant, UsageSpan
from quotas.services.requests import request_submit
from tests.pool.executors.conformance import Conformance, state
from tests.pool.executors.place import reserved
from tests.pool.executors.slurm_rig import SlurmRig
from tests.pool.executors.slurm_testbed import Testbed, need_slurm
from tests.quotas import build

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """One Slurm for the whole module."""
    need_slurm()
    made = Testbed(Path(tmp_path_factory.mktemp("slurm")))
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def rig(bed: Testbed) -> Iterator[SlurmRig]:
    yield SlurmRig(bed)
    bed.run("scancel", f"--user={bed.me}", "--signal=KILL", "--full", check=False)
    bed.run("scancel", f"--user={bed.me}", check=False)
    bed.wait(lambda: bed.idle() >= bed.nodes, "idle nodes")


class TestSlurm(Conformance):
    @pytest.fixture
    def rig(self, rig: SlurmRig) -> SlurmRig:
        return rig


def output(member: AllocationMember) -> str:
    rows = AllocationLog.objects.filter(allocation_id=member.allocation_id, member=0).order_by("offset")
    return "".join(rows.values_list("data", flat=True))


def test_from_the_request_to_the_ledger(rig: SlurmRig, client: Client) -> None:
    """Asked, approved by policy, placed, run on its cards by Slurm, its output on the page, billed."""
    who = build.user("lin", rig.team)
    build.role(who, "researcher", rig.team)
    build.price(rig.flavour, 16)
    rig.look()
    asked = {
        "department": rig.team.code, "flavour": rig.flavour.code, "gpus_per_node": 2, "duration_s": 3600,
        "purpose": "a test",
        "command": "echo on $(hostname) cards $CUDA_VISIBLE_DEVICES for $GPUPOOL_USER; exit 4",
    }  # fmt: skip
    request = request_submit(acting_user=build.actor(who), policy=build.policy(who), values=asked)
    assert request.state == "queued"
    schedule_cycle()
    allocation = Allocation.objects.get(request=request)
    member = allocation.members.get()
    rig.settle(lambda: state(member) == AllocationMember.State.FREE)
    allocation.refresh_from_db()
    assert (allocation.state, allocation.end_reason, allocation.exit_code) == ("ended", "failed", 4)
    assert member.node.name.startswith("gpu")
    outputs_follow(cluster_id=rig.cluster.pk)
    assert f"on {rig.bed.host} cards 0,1 for lin\n" in output(member)
    assert {span.ended_at is None for span in UsageSpan.objects.all()} == {False}
    assert UsageSpan.objects.count() == 2
    client.force_login(who)
    page = client.get(reverse("pool:allocation", args=[allocation.uid])).content.decode()
    assert member.node.name in page
    log = client.get(reverse("pool:allocation-log", args=[allocation.uid])).content.decode()
    assert "cards 0,1 for lin" in log


def test_a_gang_is_one_job_with_ranks(rig: SlurmRig) -> None:
    command = "echo rank $NODE_RANK of $NNODES, $NPROC_PER_NODE each, world $WORLD_SIZE at $MASTER_ADDR"
    allocation = reserved(rig.team, rig.flavour, 2, command=command, nodes=2)
    assert allocation_start(allocation_id=allocation.pk)
    first = allocation.members.get(number=0)
    rig.settle(lambda: Allocation.objects.get(pk=allocation.pk).state == "ended")
    outputs_follow(cluster_id=rig.cluster.pk)
    names = sorted(allocation.members.values_list("node__name", flat=True))
    lines = sorted(line for line in output(first).splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 2, 2 each, world 4 at {names[0]}" for rank in (0, 1)]
    assert set(allocation.members.values_list("external_id", flat=True).distinct()) == {first.external_id}


def test_drains_are_kept_in_step_and_work_goes_on(rig: SlurmRig) -> None:
    member = rig.member()
    rig.start(member)
    rig.settle(lambda: state(member) == AllocationMember.State.RUNNING)
    node = member.node
    rig.bed.run("scontrol", "update", f"NodeName={node.name}", "State=DRAIN", "Reason=fan broken")
    rig.settle(lambda: Node.objects.get(pk=node.pk).schedulable == Node.Schedulable.CORDONED)
    closed = Node.objects.get(pk=node.pk)
    assert (closed.schedulable_reason.split(" [")[0], closed.health) == ("fan broken", Node.Health.OK)
    assert state(member) == AllocationMember.State.RUNNING
    rig.bed.run("scontrol", "update", f"NodeName={node.name}", "State=RESUME")
    rig.settle(lambda: Node.objects.get(pk=node.pk).schedulable == Node.Schedulable.OPEN)
    # And the other way: people here close it, and open it again.
    node_cordon(acting_user=system("test"), node=Node.objects.get(pk=node.pk), reason="new driver")
    rig.settle(lambda: "DRAIN" in node_word(rig, node, "State"))
    assert node_word(rig, node, "Reason").startswith("gpupool: new driver")
    node_uncordon(acting_user=system("test"), node=Node.objects.get(pk=node.pk), reason="done")
    rig.settle(lambda: "DRAIN" not in node_word(rig, node, "State"))
    rig.look()
    assert Node.objects.get(pk=node.pk).schedulable == Node.Schedulable.OPEN
    assert rig.copies(member) == 1


def node_word(rig: SlurmRig, node: Node, field: str) -> str:
    return fields(rig.bed.run("scontrol", "-o", "show", "node", node.name)).get(field, "")


def test_preempted_by_slurm_it_goes_back_in_line(rig: SlurmRig) -> None:
    """Somebody's urgent job takes the node; what was put out by Slurm keeps its place here, and not one of the cards
    is given to anything of ours before the urgent job is seen on them, however late it begins."""
    member = rig.member(gpus=4)
    rig.start(member)
    rig.settle(lambda: state(member) == AllocationMember.State.RUNNING)
    urgent = ["-A", "ml", "-p", "urgent", "-w", member.node.name, "--gres=gpu:a100:4", "--mem=100"]
    job = rig.bed.run(
        "sbatch", "--parsable", *urgent, "-o", "/dev/null", stdin="#!/bin/bash\nsleep 600\n"
    ).strip()
    rig.settle(lambda: Allocation.objects.get(pk=member.allocation_id).state == "ended")
    row = Allocation.objects.get(pk=member.allocation_id)
    assert (row.error_code, row.end_rule) == ("preempted_outside", "requeue")
    on_node = Lease.objects.filter(gpu__node=member.node, ended_at=None)
    assert not on_node.exists()
    rig.settle(lambda: {name for name, _user in uses(member.node)} == {job})
    assert uses(member.node) == [(job, rig.bed.me)] * 4
    foreign = Cluster.objects.get(pk=rig.cluster.pk).foreign_work
    assert [(work["id"], work["user"], work["gpus"], work["nodes"]) for work in foreign] == [
        (job, rig.bed.me, 4, [member.node.name])
    ]
    assert not on_node.exists()


def uses(node: Node) -> list[tuple[str, str]]:
    """Foreign work and its user, of each card of a node."""
    return [
        (str(use.get("work")), str(use.get("user")))
        for card in node.gpus.order_by("index")
        for use in card.foreign_use
    ]


def test_limits_are_shown_before_they_are_pushed(rig: SlurmRig) -> None:
    QuotaGrant.objects.create(
        department=rig.team,
        flavour=rig.flavour,
        guaranteed=3000,
        borrow_limit=2500,
        during=(now() - timedelta(days=1), None),
    )
    before = limits_diff(cluster=rig.cluster)
    assert before == [Limit("ml", "gres/gpu", None, 6)]
    assert "gres/gpu" not in rig.bed.run(
        "sacctmgr", "-n", "-P", "show", "assoc", "account=ml", "format=GrpTRES"
    )
    with pytest.raises(Conflict):
        limits_push(acting_user=system("test"), cluster=rig.cluster, seen=[])
    assert limits_push(acting_user=system("test"), cluster=rig.cluster, seen=before) == before
    assert limits_diff(cluster=rig.cluster) == []
    assert "gres/gpu=6" in rig.bed.run(
        "sacctmgr", "-n", "-P", "show", "assoc", "account=ml", "format=GrpTRES"
    )
    rig.executor.limits_set(cluster=rig.cluster, limits=[Limit("ml", "gres/gpu", 6, None)])  # type: ignore[attr-defined]
    assert limits_diff(cluster=rig.cluster) == before


def test_by_slurmrestd_the_same_life(bed: Testbed, rig: SlurmRig) -> None:
    """Over the unix socket: start, twice, lost, stop, end; nothing by the command line but what it lacks."""
    rig.cluster.settings = {**rig.cluster.settings, "transport": "rest", "rest_url": bed.start_rest()}
    rig.cluster.save()
    assert [item for item in rig.executor.check(cluster=rig.cluster).findings if not item[1]] == []
    member = rig.member()
    rig.start(member)
    rig.start(member)
    rig.settle(lambda: state(member) == AllocationMember.State.RUNNING)
    assert rig.copies(member) == 1
    stopping.stop(
        acting_user=system("test"), allocation_id=member.allocation_id, cause="released", grace_s=10
    )
    rig.settle(lambda: Allocation.objects.get(pk=member.allocation_id).state == "ended")
    other = rig.member()
    rig.start(other)
    rig.settle(lambda: state(other) == AllocationMember.State.RUNNING)
    rig.finish(other, 7)
    rig.settle(lambda: Allocation.objects.get(pk=other.allocation_id).state == "ended")
    assert Allocation.objects.get(pk=other.allocation_id).exit_code == 7


def test_the_books_of_slurm_agree_with_ours(rig: SlurmRig) -> None:
    member = rig.member()
    rig.start(member)
    rig.settle(lambda: state(member) == AllocationMember.State.RUNNING)
    rig.finish(member)
    rig.settle(lambda: Allocation.objects.get(pk=member.allocation_id).state == "ended")
    since = now() - timedelta(hours=1)
    rig.bed.wait(
        lambda: any(
            row.uid == member.allocation.uid and row.ended_at is not None
            for row in rig.executor.accounts(
                cluster=rig.cluster, since=since, until=now() + timedelta(minutes=1)
            )  # type: ignore[attr-defined]
        ),
        "the accounting",
    )
    found = accounts_compare(cluster=rig.cluster, since=since, until=now() + timedelta(minutes=1))
    assert (found.compared, found.differences) == (1, [])
    AllocationMember.objects.filter(pk=member.pk).update(started_at=now() - timedelta(minutes=50))
    found = accounts_compare(cluster=rig.cluster, since=since, until=now() + timedelta(minutes=1))
    assert [(item["allocation"], item["what"]) for item in found.differences] == [
        (member.allocation.ref, "started_at")
    ]
    assert Incident.objects.filter(kind="accounts_differ", state="open").count() == 1


def theirs(rig: SlurmRig, gpus: int, command: str = "sleep 600") -> str:
    """A job of somebody who does not come through the pool, seen by a look on its cards."""
    job = rig.bed.run(
        "sbatch", "--parsable", "-p", "batch", "-A", "ml", f"--gres=gpu:a100:{gpus}", "--mem=100", "--requeue",
        "--comment=mine to keep", "-o", "/dev/null", "--wrap", command,
    ).strip()  # fmt: skip
    rig.settle(lambda: len(marked(rig)) == gpus)
    return job


def marked(rig: SlurmRig) -> list[int]:
    cards = Gpu.objects.filter(node__cluster=rig.cluster).exclude(foreign_use=[])
    return sorted(cards.values_list("pk", flat=True))


def taken_in(rig: SlurmRig, job: str) -> Allocation:
    who = build.user("lin", rig.team)
    build.role(who, "researcher", rig.team)
    wishes = {
        "department": rig.team.code,
        "duration_s": 3600,
        "purpose": "ran before",
        "interruptible": False,
    }
    return work_adopt(
        acting_user=system("test"), cluster=rig.cluster, external_id=job, person="lin", values=wishes
    )


def comment(rig: SlurmRig, job: str) -> str:
    return rig.bed.run("squeue", "-h", "-j", job, "-o", "%k").strip()


def test_what_runs_there_is_taken_in_and_ends_like_any_other(rig: SlurmRig) -> None:
    job = theirs(rig, 2)
    cards = marked(rig)
    allocation = taken_in(rig, job)
    assert sorted(Lease.objects.values_list("gpu_id", flat=True)) == cards
    assert comment(rig, job) == f"gpupool:{allocation.uid} mine to keep"
    rig.look()
    assert allocation_start(allocation_id=allocation.pk) is False
    allocation.refresh_from_db()
    assert (allocation.state, marked(rig)) == ("running", [])
    assert rig.bed.run("squeue", "-h", "-o", "%A").split() == [job]
    stopping.stop(acting_user=system("test"), allocation_id=allocation.pk, cause="released", grace_s=1)
    rig.settle(lambda: Allocation.objects.get(pk=allocation.pk).state == "ended")
    assert Allocation.objects.get(pk=allocation.pk).end_reason == "released"
    assert {span.ended_at is None for span in UsageSpan.objects.all()} == {False}


def test_taken_in_and_forgotten_by_the_controller_its_end_is_in_the_accounting(rig: SlurmRig) -> None:
    """It ended while nobody looked, and the controller has purged it since (MinJobAge)."""
    go = rig.bed.top / "go"
    job = theirs(rig, 1, f"while [ ! -e {go} ]; do sleep 0.1; done; exit 47")
    allocation = taken_in(rig, job)
    rig.look()
    go.touch()
    # By its own exit code: a controller that lost its state counts from 1 again, and the accounting has others' ends
    # under the same number.
    rig.bed.wait(
        lambda: "47:0" in rig.bed.run("sacct", "-X", "-D", "-n", "-j", job, "-o", "ExitCode"),
        "the end in the accounting",
    )
    go.unlink()
    rig.bed.stop_controller()
    rig.bed.start_controller(empty=True)
    assert rig.bed.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T", check=False).strip() == ""
    rig.settle(lambda: Allocation.objects.get(pk=allocation.pk).state == "ended")
    allocation.refresh_from_db()
    told = (allocation.end_reason, allocation.error_code, allocation.error_detail, allocation.request.state)
    assert told == ("failed", "", "", "ended")
    assert AllocationMember.objects.get(allocation=allocation).exit_code == 47


def test_taken_in_and_put_back_in_line_by_slurm_it_is_slurm_s_again(rig: SlurmRig) -> None:
    job = theirs(rig, 1)
    allocation = taken_in(rig, job)
    rig.look()
    rig.bed.run("scontrol", "requeue", job)
    rig.settle(lambda: Allocation.objects.get(pk=allocation.pk).state == "ended")
    allocation.refresh_from_db()
    assert (allocation.error_code, allocation.request.state) == ("requeued_outside", "ended")
    assert comment(rig, job) == "mine to keep"
    assert rig.bed.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "PENDING"


def test_past_the_quota_a_job_stays_what_it_was(rig: SlurmRig) -> None:
    build.limits(rig.team, rig.flavour, 1, hard_cap=1)
    job = theirs(rig, 2)
    cards = marked(rig)
    with pytest.raises(Blocked):
        taken_in(rig, job)
    assert comment(rig, job) == "mine to keep"
    assert (Allocation.objects.count(), marked(rig)) == (0, cards)
