"""What people do in their leases from afar (shell, files, ports): who may, where it goes, and the trail of it.

Only the holder of an allocation reaches into it: neither leads nor administrators. A session is one row of the audit
trail; its bytes pass through and are kept nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.core.cache import cache
from django.db import transaction
from django.db.models import Q
from django.utils.translation import gettext as _

from pool.models import Allocation, AllocationEvent, AllocationMember, Cluster
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, DomainError, Invalid, NotFound, Refused
from portal.ops.actor import Actor
from portal.ops.services import audit_record

KINDS = ("shell", "get", "put", "forward")
FIELDS = {
    "shell": {"kind", "member", "argv", "term", "rows", "cols"},
    "get": {"kind", "member", "path", "changed"},
    "put": {"kind", "member", "path"},
    "forward": {"kind", "member", "port"},
}
PER_MINUTE = 60
FRESH = timedelta(seconds=30)
RESULTS_KEPT = timedelta(days=7)
LONGEST_WORDS = 20_000
M = AllocationMember.State


@dataclass(frozen=True)
class Opened:
    """Where a session goes: to which node's agent, and what it is told."""

    node_id: int
    allocation: str
    member: int
    order: dict[str, Any]


def remote_open(*, acting_user: Actor, policy: Policy, uid: UUID, order: dict[str, Any]) -> Opened:
    """Let a holder into a member of an allocation, and note it.

    Errors: `NotFound`; `Refused` ``not_yours``; `Invalid` by field; `Conflict` ``not_running``, ``results_gone``,
    ``node_away``, ``simulated``, ``remote_not_supported``; 429 ``too_many_sessions``.
    """
    kind, number = _read(order)
    found = (
        Allocation.objects.filter(uid=uid)
        .filter(policy.reads.q("department_id") | Q(holder=policy.user))
        .select_related("request")
        .first()
    )
    if found is None:
        raise NotFound(code="not_found", detail=_("There is no such allocation here."))
    if found.holder_id != acting_user.user_id:
        raise Refused(code="not_yours", detail=_("Only its holder works in a lease."))
    member = found.members.select_related("node__cluster").filter(number=number).first()
    if member is None:
        raise Invalid.field("member", _("This allocation has no member of that number."))
    _open_now(found, member, kind)
    key = f"remote-rate:{acting_user.user_id}:{int(now().timestamp()) // 60}"
    cache.add(key, 0, 120)
    if cache.incr(key) > PER_MINUTE:
        raise DomainError(
            code="too_many_sessions",
            detail=_("Too many sessions within a minute. Wait a little."),
            status=429,
        )
    facts = {"kind": kind, "member": number}
    if kind == "forward":
        facts["port"] = order["port"]
    with transaction.atomic():
        AllocationEvent.objects.create(
            allocation=found, at=now(), kind="remote_opened", actor_name=acting_user.name, facts=facts
        )
        audit_record(
            acting_user=acting_user,
            action="remote.opened",
            subject=found,
            after=facts,
            department_id=found.department_id,
        )
    return Opened(member.node_id, str(found.uid), number, {k: v for k, v in order.items() if k != "member"})


def _read(order: dict[str, Any]) -> tuple[str, int]:
    """(kind, member) of an order whose fields all make sense."""
    kind = order.get("kind")
    if kind not in KINDS:
        raise Invalid.field("kind", _("One of: %(known)s.") % {"known": ", ".join(KINDS)})
    for name in sorted(set(order) - FIELDS[kind]):
        raise Invalid.field(name[:40], _("unknown field"))
    number = order.get("member", 0)
    if type(number) is not int or not 0 <= number <= 9999:
        raise Invalid.field("member", _("A whole number from 0 on is needed here."))
    argv = order.get("argv", [])
    if not isinstance(argv, list) or not all(isinstance(word, str) and "\0" not in word for word in argv):
        raise Invalid.field("argv", _("A list of words."))
    if sum(map(len, argv)) > LONGEST_WORDS:
        raise Invalid.field("argv", _("That is too long."))
    path = order.get("path", ".")
    if not isinstance(path, str) or len(path) > 1024:
        raise Invalid.field("path", _("A path within the work folder."))
    port = order.get("port", 1)
    if type(port) is not int or not 1 <= port <= 65535 or (kind == "forward" and "port" not in order):
        raise Invalid.field("port", _("A port from 1 to 65535."))
    for name in ("rows", "cols"):
        if type(order.get(name, 1)) is not int:
            raise Invalid.field(name, _("A whole number from 1 on is needed here."))
    return kind, number


def _open_now(found: Allocation, member: AllocationMember, kind: str) -> None:
    """Whether this can be done at this moment."""
    if member.node.cluster.executor != Cluster.Executor.AGENT:
        raise Conflict(
            code="remote_not_supported",
            detail=_("Work on this cluster is reached by the cluster's own tools, not from here."),
        )
    if member.node.simulated:
        raise Conflict(code="simulated", detail=_("This node is simulated: nothing really runs there."))
    if kind == "get" and member.ended_at is not None:
        if member.ended_at < now() - RESULTS_KEPT:
            raise Conflict(
                code="results_gone", detail=_("It ended more than 7 days ago; its folder is no longer kept.")
            )
    elif member.state != M.RUNNING or found.state not in (
        Allocation.State.RUNNING,
        Allocation.State.STOPPING,
    ):
        raise Conflict(code="not_running", detail=_("It does not run (yet, or any more)."))
    if member.node.last_heartbeat_at is None or member.node.last_heartbeat_at < now() - FRESH:
        raise Conflict(code="node_away", detail=_("Its node is not connected at the moment. Try again soon."))


def remote_still_open(*, user_id: int, uid: UUID, kind: str) -> bool:
    """Whether a session may go on: the person is active, and what it needs still runs."""
    rows = Allocation.objects.filter(uid=uid, holder_id=user_id, holder__is_active=True)
    if kind != "get":
        rows = rows.filter(state__in=(Allocation.State.RUNNING, Allocation.State.STOPPING))
    return rows.exists()
