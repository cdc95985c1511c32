"""One life of the story through the real services, each step under its own clock, in one transaction.

What is there now (live leases on the same cards, the counters they moved) is set aside inside the transaction
and put back at its end, so that nobody outside ever sees the past happen, and the past is judged by itself:
the constraints of the database hold over both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.models import F, Func, Value

from pool.engine.model import Gpu as EngineGpu
from pool.engine.model import Member, Place, Take
from pool.locks import gpus_lock
from pool.models import AgentCommand, AllocationMember, Lease, LeaseSpan, ReclaimCase
from pool.services.allocations import allocation_release
from pool.services.closing import allocation_finish
from pool.services.execution import allocation_start
from pool.services.member_reports import member_ended, member_free, member_running
from pool.services.plan_apply import place_apply
from pool.services.snapshot import snapshot_load
from pool.services.stopping import stop
from portal.accounts.models import RoleBinding, User
from portal.accounts.policy import DepartmentTree, policy_of
from portal.demo.first import ask
from portal.demo.fleet import LAYOUT, SPLITS
from portal.demo.story import Life, Seat
from portal.kernel.clock import set_clock
from portal.kernel.errors import Conflict, DomainError
from portal.ops.actor import Actor, system
from portal.ops.models import OutboxEvent
from quotas.models import ApprovalStep, CapacityRequest, GpuFlavour, QuotaUsage
from quotas.services.approvals import step_decide
from quotas.services.locks import flavour_lock

COUNTERS = ("direct", "direct_noninterruptible", "charged", "total", "total_noninterruptible")
RULES = system("rules")


@dataclass
class Stage:
    """What stays the same over all lives: read once."""

    people: dict[str, User]
    flavours: dict[str, GpuFlavour]
    cards: dict[tuple[str, int], tuple[int, EngineGpu]]
    tree: DepartmentTree
    approvers: dict[str, list[tuple[int, int | None]]]
    anchor: datetime

    @classmethod
    def load(cls, anchor: datetime) -> Stage:
        """Four queries and the scheduler's own picture of the fleet."""
        cards = {
            (node.name, gpu.index): (node.id, gpu)
            for node in snapshot_load(requests=[]).snapshot.nodes
            for gpu in node.gpus
        }
        approvers: dict[str, list[tuple[int, int | None]]] = {}
        for role, user_id, department_id in RoleBinding.objects.order_by("id").values_list(
            "role", "user_id", "department_id"
        ):
            approvers.setdefault(role, []).append((user_id, department_id))
        return cls(
            people={u.username: u for u in User.objects.all()},
            flavours={f.code: f for f in GpuFlavour.objects.all()},
            cards=cards,
            tree=DepartmentTree.load(),
            approvers=approvers,
            anchor=anchor,
        )


def play(life: Life, stage: Stage) -> str:
    """Write one life; "" when done (or done before), else the code why it could not be."""
    try:
        with transaction.atomic():
            if CapacityRequest.objects.filter(client_token=life.token).exists():
                return ""
            flavour = stage.flavours[life.flavour]
            with _past_alone(flavour.pk, [stage.cards[seat.card][1].id for seat in life.seats]):
                refs = _live(life, stage)
            _no_messengers(life, refs)
    except DomainError as error:
        return error.code
    return ""


@contextmanager
def _past_alone(flavour_id: int, gpu_ids: list[int]) -> Iterator[None]:
    """Set aside open leases on these cards and the counters of the flavour; put them back at the end."""
    flavour_lock(flavour_id)
    usage = list(QuotaUsage.objects.select_for_update().filter(flavour_id=flavour_id).order_by("id"))
    gpus_lock(gpu_ids)
    open_leases = list(Lease.objects.filter(gpu_id__in=gpu_ids, ended_at=None).values_list("pk", flat=True))
    spans = list(
        LeaseSpan.objects.filter(gpu_id__in=gpu_ids, during__upper_inf=True).values_list("pk", "during")
    )
    QuotaUsage.objects.filter(flavour_id=flavour_id).update(**dict.fromkeys(COUNTERS, 0))
    if open_leases:
        Lease.objects.filter(pk__in=open_leases).update(ended_at=F("started_at"))
    if spans:
        empty = Func(Value("empty"), template="%(expressions)s::tstzrange")
        LeaseSpan.objects.filter(pk__in=[pk for pk, _during in spans]).update(during=empty)
    yield
    QuotaUsage.objects.bulk_update(usage, COUNTERS)
    if open_leases:
        Lease.objects.filter(pk__in=open_leases).update(ended_at=None)
    for pk, during in spans:
        LeaseSpan.objects.filter(pk=pk).update(during=during)


def _live(life: Life, stage: Stage) -> list[str]:
    """Returns the references of what was made: events carry them as their key."""
    user = stage.people[life.person]
    request = _ask(life, stage, user)
    request = _agree(life, stage, request)
    with set_clock(life.started_at):
        place = _place(life, stage, request)
        applied = place_apply(place=place, request=request, flavour_id=request.flavour_id)
        if applied.allocation is None:
            raise Conflict(code=applied.refusal or "not_placed", detail="not placed")
        allocation = applied.allocation
    with set_clock(life.started_at + timedelta(seconds=1)):
        allocation_start(allocation_id=allocation.pk)
    running = life.started_at + timedelta(seconds=4)
    members = list(
        AllocationMember.objects.filter(allocation=allocation).select_related("node").order_by("number")
    )
    with set_clock(running):
        for member in members:
            member_running(member=member, at=running, pid=20_000 + life.number, account=user.node_account)
    end = life.ended_at
    with set_clock(end):
        if life.end == "released":
            allocation_release(acting_user=Actor(user=user, via="page"), allocation=allocation)
        elif life.end == "expired":
            stop(
                acting_user=RULES, allocation_id=allocation.pk, cause=ReclaimCase.Cause.EXPIRED, rule="expiry"
            )
    gone = end + timedelta(seconds=3)
    code = {"finished": 0, "failed": 1}.get(life.end)
    with set_clock(gone):
        for member in members:
            member_ended(
                member=member,
                at=gone,
                exit_code=code,
                signal=None if code is not None else 15,
                error=None,
                failed_start=False,
            )
    free = end + timedelta(seconds=6)
    with set_clock(free):
        for member in members:
            leases = Lease.objects.filter(allocation=allocation, member=member.number)
            found: dict[str, dict[str, Any]] = {
                uuid: {"free": True, "reason": None, "procs": []}
                for uuid in leases.values_list("gpu__uuid", flat=True)
            }
            member_free(member=member, at=free, found=found)
        if not allocation_finish(allocation_id=allocation.pk):
            raise Conflict(code="not_finished", detail="not finished")
    return [request.ref, allocation.ref]


def _ask(life: Life, stage: Stage, user: User) -> CapacityRequest:
    seat = life.seats[0]
    shapes: dict[str, dict[str, Any]] = {
        "whole": {},
        "mig": {"shape": "mig", "mig_profile": seat.profile, "mig_count": 1},
        "fraction": {"shape": "fraction", "fraction_milli": 500, "fraction_mib": 23_000},
    }
    with set_clock(life.submitted_at):
        asked = ask(
            user,
            stage.flavours[life.flavour],
            len(life.seats),
            life.hours,
            life.purpose,
            department=stage.tree.rows[user.home_department_id or 0],
            **shapes[life.shape],
        )
    CapacityRequest.objects.filter(pk=asked.pk).update(client_token=life.token)
    asked.client_token = life.token
    found: CapacityRequest = asked
    return found


def _agree(life: Life, stage: Stage, request: CapacityRequest) -> CapacityRequest:
    """Everyone whose agreement the policy asks for gives it, one after the other."""
    moment = life.decided_at
    for _turn in range(4):
        step = (
            ApprovalStep.objects.filter(request=request, state=ApprovalStep.State.OPEN)
            .order_by("position")
            .first()
        )
        if step is None:
            break
        moment += timedelta(seconds=7)
        with set_clock(min(moment, life.started_at - timedelta(seconds=5))):
            person = _approver(stage, step, request)
            step_decide(
                acting_user=Actor(user=person, via="page"),
                policy=policy_of(person, stage.tree),
                step=step,
                decision="approve",
            )
    request.refresh_from_db()
    if request.state != CapacityRequest.State.QUEUED:
        raise Conflict(code="not_queued", detail=request.state)
    return request


def _approver(stage: Stage, step: ApprovalStep, request: CapacityRequest) -> User:
    """The first person who holds the step's role over the department and is not the requester."""
    above = set(stage.tree.ancestors(request.department_id))
    by_id = {user.pk: user for user in stage.people.values()}
    for user_id, department_id in stage.approvers.get(step.role, []):
        if user_id != request.requester_id and (department_id is None or department_id in above):
            return by_id[user_id]
    raise Conflict(code="no_approver", detail=step.role)


def _place(life: Life, stage: Stage, request: CapacityRequest) -> Place:
    members = []
    for number, name in enumerate(dict.fromkeys(seat.node for seat in life.seats)):
        takes = tuple(_take(stage.cards[seat.card][1], seat) for seat in life.seats if seat.node == name)
        node_id = stage.cards[name, life.seats[0].index][0]
        members.append(Member(number, node_id, 8_000 * len(takes), 65_536 * len(takes), takes))
    charge = sum(take.charge_milli for member in members for take in member.takes)
    return Place(request.pk, life.flavour, charge, 0, tuple(members), None)


def _take(gpu: EngineGpu, seat: Seat) -> Take:
    if seat.profile:
        one = next(s for s in gpu.slices if s.profile == seat.profile and _starts(s.span[0], seat, gpu))
        return Take(gpu.id, (one.span,), one.charge_milli, one.memory_mib, one.id)
    if seat.milli < 1000:
        return Take(gpu.id, ((seat.start, seat.start + seat.milli),), seat.milli, 23_000)
    return Take(gpu.id, ((0, 1000),), 1000, 0)


def _starts(low: int, seat: Seat, gpu: EngineGpu) -> bool:
    """Whether a slice's span begins where the seat's memory slot does (twins have the same profile)."""
    order = sorted(s.span[0] for s in gpu.slices if s.profile == seat.profile)
    model = next(kind.code for _site, name, kind, _count, _split in LAYOUT if name == seat.node)
    starts = sorted(start for profile, start, _size, _mib in SPLITS[model] if profile == seat.profile)
    return order.index(low) == starts.index(seat.start)


def _no_messengers(life: Life, refs: list[str]) -> None:
    """The past needs no notices, no orders to agents, no pokes: they count as delivered."""
    OutboxEvent.objects.filter(done_at=None, key__in=refs).update(done_at=life.ended_at)
    AgentCommand.objects.filter(allocation__request__client_token=life.token).update(
        sent_at=life.started_at, acked_at=life.started_at
    )
    connection.run_on_commit = []
