"""Adoption: work that an outside system runs already becomes an allocation of ours, on exactly the cards it has.

The work is marked over there first, with a uid made from its own name, so that a process that dies in between leaves a
mark that the next try finds again. Then everything is written in one transaction, under the same locks and constraints
as any placement; a refusal takes the mark back and changes nothing. No start is ever ordered: from then on looks find
the work by its mark, and its end is seen like any other. Work that goes back into another system's line is let go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from typing import Any
from uuid import UUID, uuid5

from django.core.cache import cache
from django.db import IntegrityError, transaction
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _

from pool.engine.model import WHOLE, Member, Place, Take
from pool.executors.base import ADOPTS, ExecutorFailure, PolledExecutor, Work, polled_executor
from pool.models import Allocation, AllocationEvent, Cluster, Gpu
from pool.services.clusters import outside
from pool.services.conditions import gpu_foreign_use_set
from pool.services.member_reports import member_running
from pool.services.nodes import require_pool_admin
from pool.services.plan_apply import place_write
from pool.services.polling import open_members
from portal.accounts.models import Department, User
from portal.accounts.policy import policy_of
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid
from portal.ops.actor import Actor
from portal.ops.services import audit_record
from quotas.engine.available import borrowed
from quotas.models import CapacityRequest
from quotas.selectors.trees import quota_trees
from quotas.services.adoption import request_adopt

ONE_AT_A_TIME_S = 120
LONGEST_H = 30 * 24
"""Hours that a form proposes at most; Slurm says a year where a job has no limit."""


@dataclass(frozen=True, slots=True)
class Held:
    """What outside work has here: the cards that stand for it, by node in the order of its nodes."""

    work: Work
    uid: UUID
    by_node: tuple[tuple[Gpu, ...], ...]

    @property
    def cards(self) -> list[Gpu]:
        """All its cards."""
        return [card for row in self.by_node for card in row]


def work_adopt(
    *, acting_user: Actor, cluster: Cluster, external_id: str, person: str, values: Mapping[str, Any]
) -> Allocation:
    """Take running work in for ``person`` (a user name). ``values`` as of a request: department, duration_s, purpose,
    interruptible, cost_code; what it takes of cards is what it has.

    Invalid (person, fields), Conflict (work, cards), Blocked (quota, limits); nothing is changed then.
    """
    require_pool_admin(acting_user)
    executor = polled_executor(cluster)
    if executor is None or ADOPTS not in executor.can:
        raise Conflict(
            code="cannot_adopt", detail=_("What carries this cluster cannot take running work in.")
        )
    who = User.objects.filter(username=person.strip(), is_active=True).first()
    if who is None:
        raise Invalid.field("person", _("There is no active person with this user name."))
    department = Department.objects.without_tree_fields().filter(code=str(values.get("department"))).first()
    if department is None or department.pk not in policy_of(who).asks_for:
        raise Invalid.field("department", _("{name} has no role there.").format(name=who.get_full_name()))
    key = f"pool.adopt.{cluster.pk}.{external_id}"
    if not cache.add(key, 1, ONE_AT_A_TIME_S):
        raise Conflict(code="being_adopted", detail=_("Somebody takes it in at this moment."))
    try:
        held = work_held(cluster=cluster, executor=executor, external_id=external_id)
        with outside():
            executor.adopt(cluster=cluster, external_id=external_id, uid=held.uid)
        try:
            return _write(acting_user, cluster, held, who, values)
        except BaseException:
            _take_back(executor, cluster, held)
            raise
    finally:
        cache.delete(key)


def adoption_first(*, cluster: Cluster, work: Mapping[str, Any]) -> dict[str, str]:
    """What a form begins with, from what a look told of the work: the person of its user's name, the department of its
    account or namespace, the hours that the outside system would still give it."""
    user = User.objects.filter(username=work.get("user") or "", is_active=True).first()
    account = str(work.get("account") or "")
    prefix = f"{cluster.settings.get('namespace_prefix') or 'gpupool'}-"
    named = {str(there): code for code, there in (cluster.settings.get("accounts") or {}).items()}
    code = named.get(account, account.removeprefix(prefix))
    department = Department.objects.without_tree_fields().filter(code=code).first()
    if department is None and user is not None:
        department = user.home_department
    ends_at = parse_datetime(str(work.get("ends_at") or ""))
    left = 24 if ends_at is None else max(1, ceil((ends_at - now()).total_seconds() / 3600))
    return {
        "person": user.username if user is not None else "",
        "department": department.code if department is not None else "",
        "hours": str(min(left, LONGEST_H)),
        "purpose": "",
        "interruptible": "no",
    }


def work_held(*, cluster: Cluster, executor: PolledExecutor, external_id: str) -> Held:
    """Outside work as it is now, with its cards; Conflict where it cannot be taken in, and why."""
    with outside():
        look = executor.look(cluster=cluster, members=open_members(cluster), nodes=False)
    work = next((one for one in look.others if one.external_id == external_id), None)
    if work is None or work.started_at is None:
        raise Conflict(code="work_not_running", detail=_("It does not run there, or not any more."))
    uid = uuid5(cluster.uid, f"{external_id} {work.started_at.isoformat()}")
    if work.uid not in (None, uid):
        raise Conflict(code="adopted_already", detail=_("It carries the mark of another allocation."))
    cards = [
        card
        for card in Gpu.objects.filter(node__cluster=cluster, node__name__in=work.nodes)
        .exclude(foreign_use=[])
        .select_related("node__cluster__site", "flavour")
        .order_by("index")
        if _is_of(card, external_id)
    ]
    by_node = tuple(tuple(card for card in cards if card.node.name == name) for name in work.nodes)
    if not cards or len(cards) != work.gpus:
        raise Conflict(
            code="work_cards_unclear",
            detail=_(
                "It has {n} GPUs there, {seen} are marked as its own here: look again in some seconds."
            ).format(n=work.gpus, seen=len(cards)),
        )
    if len({len(row) for row in by_node}) != 1 or len({card.flavour_id for card in cards}) != 1:
        raise Conflict(
            code="work_uneven",
            detail=_(
                "Its nodes do not all have the same number of cards of one flavour: no request says that."
            ),
        )
    if cards[0].flavour is None or any(card.mig_enabled for card in cards):
        raise Conflict(
            code="work_on_parts", detail=_("Only work on whole cards of a known flavour is taken in.")
        )
    return Held(work, uid, by_node)


def _is_of(card: Gpu, external_id: str) -> bool:
    return bool(card.foreign_use) and all(item.get("work") == external_id for item in card.foreign_use)


def _write(actor: Actor, cluster: Cluster, held: Held, who: User, values: Mapping[str, Any]) -> Allocation:
    work, flavour = held.work, held.cards[0].flavour
    assert flavour is not None
    told = {
        "work": work.external_id, "cluster": cluster.code, "began": _iso(work.started_at), "user": work.user,
    }  # fmt: skip
    wishes = {
        **values,
        "flavour": flavour,
        "shape": CapacityRequest.Shape.WHOLE.value,
        "gpus_per_node": len(held.by_node[0]),
        "nodes": len(held.by_node),
        "cpu_milli": work.cpu_milli // len(held.by_node),
        "memory_mib": work.memory_mib // len(held.by_node),
    }
    try:
        with transaction.atomic():
            request = request_adopt(acting_user=actor, requester=who, values=wishes, facts=told)
            tree = quota_trees([flavour.pk])[flavour.pk]
            place = Place(
                request_id=request.pk,
                flavour=flavour.code,
                charge_milli=request.charge_milli,
                borrowed_milli=borrowed(tree, request.department_id, request.charge_milli),
                members=_members(held, wishes),
                ends_at=None,
            )
            allocation = place_write(
                place,
                request,
                flavour.pk,
                None,
                actor,
                uid=held.uid,
                unmark=lambda gpus: _unmark(gpus, work.external_id),
            )
            _runs(actor, cluster, allocation, held, told)
    except IntegrityError as error:
        raise Conflict(
            code="place_taken", detail=_("Its cards are held by somebody else meanwhile.")
        ) from error
    allocation.refresh_from_db()
    return allocation


def _members(held: Held, wishes: Mapping[str, Any]) -> tuple[Member, ...]:
    return tuple(
        Member(
            number=number,
            node_id=row[0].node_id,
            cpu_milli=wishes["cpu_milli"],
            memory_mib=wishes["memory_mib"],
            takes=tuple(Take(card.pk, (WHOLE,), 1000, card.memory_mib) for card in row),
        )
        for number, row in enumerate(held.by_node)
    )


def _unmark(gpus: Mapping[int, Gpu], external_id: str) -> None:
    """The cards are free for it alone: marks of anybody else stay and refuse the placement."""
    for card in gpus.values():
        if _is_of(card, external_id):
            gpu_foreign_use_set(gpu=card, processes=[])
            card.foreign_use = []


def _runs(
    actor: Actor, cluster: Cluster, allocation: Allocation, held: Held, told: Mapping[str, Any]
) -> None:
    """It runs from now on, as far as the pool is concerned: its lease, its end and its books begin here."""
    at = now()
    allocation.members.update(external_id=held.work.external_id[:120], ordered_at=at)
    AllocationEvent.objects.create(
        allocation=allocation, at=at, kind="adopted", actor_name=actor.name, facts=dict(told)
    )
    for member in allocation.members.select_related("node").order_by("number"):
        member_running(
            member=member,
            at=at,
            pid=None,
            account=held.work.user[:64],
            external_id=held.work.external_id[:120],
        )
    audit_record(
        acting_user=actor,
        action="allocation.adopted",
        subject=allocation,
        after=dict(told),
        department_id=allocation.department_id,
    )
    row = Cluster.objects.select_for_update().get(pk=cluster.pk)
    left = [item for item in row.foreign_work if item.get("id") != held.work.external_id]
    Cluster.objects.filter(pk=cluster.pk).update(foreign_work=left)


def _take_back(executor: PolledExecutor, cluster: Cluster, held: Held) -> None:
    """The mark of work that was refused; one that cannot be taken back is nobody's, and the next try finds it."""
    if Allocation.objects.filter(uid=held.uid).exists():
        return
    try:
        executor.disown(cluster=cluster, external_id=held.work.external_id, uid=held.uid)
    except ExecutorFailure:
        return


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at is not None else None
