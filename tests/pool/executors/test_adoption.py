"""Work that runs already is taken in: marked, placed on its own cards under all limits, never started, ended like any
other. On the system in memory; the same on real systems is in their own modules."""

from __future__ import annotations

import pytest

from pool.models import Allocation, AllocationMember, Cluster, Gpu, Lease, QueueEntry
from pool.services import stopping
from pool.services.adoption import work_adopt
from pool.services.execution import allocation_start, execution_reconcile
from portal.accounts.models import User
from portal.kernel.errors import Blocked, Conflict, DomainError, Invalid, Refused
from portal.ops.actor import system
from portal.ops.models import AuditEvent, Incident
from quotas.models import CapacityRequest, QuotaUsage, UsageSpan
from tests.pool.executors.memory import MemorySystem, Run
from tests.pool.executors.test_memory import MemoryRig
from tests.quotas import build

pytestmark = pytest.mark.django_db(transaction=True)
ADMIN = system("test")
ASK = {"duration_s": 3600, "purpose": "it ran before the pool came", "interruptible": False}


@pytest.fixture
def rig(memory: MemorySystem) -> MemoryRig:
    return MemoryRig(memory)


@pytest.fixture
def lin(rig: MemoryRig) -> User:
    made = build.user("lin", rig.team)
    build.role(made, "researcher", rig.team)
    return made


def theirs(rig: MemoryRig, *indexes: int) -> Run:
    """Somebody's work there, as a look saw it."""
    from portal.kernel.clock import now

    run = Run("901", None, 0, "hpc1", indexes=indexes, started_at=now())
    rig.system.runs.append(run)
    rig.look()
    return run


def adopt(rig: MemoryRig, **values: object) -> Allocation:
    wishes = {**ASK, "department": rig.team.code, **values}
    person = str(wishes.pop("person", "lin"))
    return work_adopt(acting_user=ADMIN, cluster=rig.cluster, external_id="901", person=person, values=wishes)


def marked() -> list[int]:
    return list(Gpu.objects.exclude(foreign_use=[]).order_by("index").values_list("index", flat=True))


def test_what_runs_becomes_an_allocation_on_its_own_cards(rig: MemoryRig, lin: User) -> None:
    run = theirs(rig, 1)
    assert marked() == [1]
    allocation = adopt(rig)
    assert (allocation.state, allocation.holder, allocation.department) == ("running", lin, rig.team)
    assert (run.uid, run.external_id) == (allocation.uid, allocation.members.get().external_id)
    lease = Lease.objects.get(allocation=allocation)
    assert (lease.gpu.index, lease.charge, lease.ended_at) == (1, 1000, None)
    span = UsageSpan.objects.get()
    assert (span.started_at, span.user) == (allocation.reserved_at, lin)
    assert QuotaUsage.objects.get(department=rig.team).direct == 1000
    request = allocation.request
    assert (request.state, request.run_kind, request.policy_rule) == ("allocated", "adopted", "adopted")
    assert list(request.events.values_list("kind", flat=True).order_by("id"))[:2] == ["adopted", "allocated"]
    assert marked() == []
    assert Incident.objects.filter(kind="foreign_use", state="open").count() == 0
    assert Cluster.objects.get(pk=rig.cluster.pk).foreign_work == []
    told = AuditEvent.objects.get(action="allocation.adopted").after
    assert (told["work"], told["cluster"], told["user"]) == ("901", "hpc", "wang")


def test_no_start_is_ever_ordered_and_looks_go_on_seeing_it(rig: MemoryRig, lin: User) -> None:
    theirs(rig, 0)
    allocation = adopt(rig)
    for _round in range(2):
        assert not allocation_start(allocation_id=allocation.pk)
        execution_reconcile()
        rig.look()
    assert "start" not in rig.system.calls
    assert Allocation.objects.get(pk=allocation.pk).state == "running"
    assert marked() == []


def test_its_end_is_seen_like_any_other_and_nothing_begins_it_again(rig: MemoryRig, lin: User) -> None:
    run = theirs(rig, 0)
    allocation = adopt(rig)
    run.error = {"code": "node_failed", "detail": "", "retryable": True}
    rig.system.over(run, None, 9)
    rig.look()
    rig.look()
    allocation.refresh_from_db()
    assert (allocation.state, allocation.error_code) == ("ended", "node_failed")
    assert allocation.request.state == "ended"
    assert not QueueEntry.objects.exists()
    assert UsageSpan.objects.get().ended_at is not None
    assert QuotaUsage.objects.get(department=rig.team).direct == 0


def test_it_is_stopped_like_any_other(rig: MemoryRig, lin: User) -> None:
    run = theirs(rig, 0)
    allocation = adopt(rig)
    stopping.stop(acting_user=ADMIN, allocation_id=allocation.pk, cause="revoked")
    assert "stop SIGTERM" in rig.system.calls
    assert run.state == "free"
    rig.look()
    rig.look()
    allocation.refresh_from_db()
    assert (allocation.state, allocation.end_reason) == ("ended", "revoked")


def unchanged(rig: MemoryRig, run: Run, marks: list[int]) -> None:
    assert not Allocation.objects.exists()
    assert not CapacityRequest.objects.exists()
    assert not AuditEvent.objects.filter(action__endswith=".adopted").exists()
    assert run.uid is None
    assert marked() == marks
    assert QuotaUsage.objects.get(department=rig.team).direct == 0


@pytest.mark.parametrize(
    ("wishes", "error", "code"),
    [
        ({"person": "nobody"}, Invalid, "invalid"),
        ({"department": "elsewhere"}, Invalid, "invalid"),
        ({"purpose": ""}, Invalid, "invalid"),
        ({"duration_s": 0}, Invalid, "invalid"),
    ],
)
def test_wrong_fields_change_nothing(
    rig: MemoryRig, lin: User, wishes: dict[str, object], error: type[DomainError], code: str
) -> None:
    run = theirs(rig, 1)
    with pytest.raises(error) as told:
        adopt(rig, **wishes)
    assert told.value.code == code
    unchanged(rig, run, [1])


def test_past_the_quota_it_is_refused_with_the_sum_and_its_mark_is_taken_back(
    rig: MemoryRig, lin: User
) -> None:
    run = theirs(rig, 0, 1)
    build.limits(rig.team, rig.flavour, 1, hard_cap=1)
    with pytest.raises(Blocked) as told:
        adopt(rig)
    assert told.value.code in ("never_fits", "over_cap")
    assert "disown 901" in rig.system.calls
    unchanged(rig, run, [0, 1])


def test_a_card_that_turned_bad_refuses_it(rig: MemoryRig, lin: User) -> None:
    run = theirs(rig, 1)
    Gpu.objects.filter(index=1).update(condition=Gpu.Condition.FAULT)
    with pytest.raises(Conflict) as told:
        adopt(rig)
    assert told.value.code == "place_fault"
    unchanged(rig, run, [1])


def test_work_that_is_gone_cards_unknown_or_a_mark_of_others_is_told(rig: MemoryRig, lin: User) -> None:
    run = theirs(rig, 1)
    run.gpus = 2
    with pytest.raises(Conflict, match="work_cards_unclear"):
        adopt(rig)
    run.gpus, run.uid = None, rig.cluster.uid
    with pytest.raises(Conflict, match="adopted_already"):
        adopt(rig)
    run.uid = None
    rig.system.over(run)
    with pytest.raises(Conflict, match="work_not_running"):
        adopt(rig)
    assert "adopt 901" not in rig.system.calls


def test_a_mark_left_by_a_process_that_died_is_found_by_the_next_try(
    rig: MemoryRig, lin: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = theirs(rig, 1)
    with monkeypatch.context() as died:
        died.setattr("pool.services.adoption._write", lambda *_: 1 / 0)
        died.setattr("pool.services.adoption._take_back", lambda *_: None)
        with pytest.raises(ZeroDivisionError):
            adopt(rig)
    left = run.uid
    assert left is not None
    rig.look()
    assert "end 901" not in rig.system.calls  # a uid that nobody here knows is never touched
    assert adopt(rig).uid == left


def test_twice_is_once(rig: MemoryRig, lin: User) -> None:
    theirs(rig, 1)
    first = adopt(rig)
    with pytest.raises(Conflict, match="work_not_running"):
        adopt(rig)
    assert list(Allocation.objects.all()) == [first]
    assert AllocationMember.objects.get().state == "running"
    assert "disown 901" not in rig.system.calls


def test_only_administrators_may(rig: MemoryRig, lin: User) -> None:
    run = theirs(rig, 1)
    with pytest.raises(Refused):
        work_adopt(
            acting_user=build.actor(lin), cluster=rig.cluster, external_id="901", person="lin", values=ASK
        )
    unchanged(rig, run, [1])


def test_an_adopted_request_is_cloned_as_a_command_and_nobody_can_ask_for_one(
    rig: MemoryRig, lin: User
) -> None:
    from quotas.services.requests import request_clone, request_submit

    theirs(rig, 1)
    allocation = adopt(rig)
    actor, policy = build.actor(lin), build.policy(lin)
    assert request_clone(acting_user=actor, policy=policy, request=allocation.request).run_kind == "command"
    with pytest.raises(Invalid):
        request_submit(
            acting_user=actor, policy=policy,
            values={**ASK, "flavour": rig.flavour.code, "run_kind": "adopted", "command": "x"},
        )  # fmt: skip
