"""Maintenance windows: planned, announced to those on the nodes, begun, ended, or cancelled.

Work that would run into a window is told `notice_s` before it, saved, stopped by its start and put back at its
old place in line. The nodes are closed at the start and opened at the end, those only that the window itself
closed. The sweep may run at any time and twice; a window that nobody swept in time goes through its states late.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _

from pool.models import (
    Allocation,
    AllocationMember,
    MaintenanceNode,
    MaintenanceWindow,
    Node,
    ReclaimCase,
    Site,
)
from pool.services.capacity import capacity_refresh
from pool.services.ladder import case_begin, case_withdraw
from pool.services.nodes import require_pool_admin
from pool.services.stopping import GRACE_S
from pool.transitions import LIVE, WINDOW_OPEN, WITHDRAWABLE, move_window
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, DomainError, FieldProblem, Invalid
from portal.kernel.models import advance
from portal.ops.actor import Actor, system
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record

SYSTEM = system("maintenance")
S = MaintenanceWindow.State
LONGEST = timedelta(days=90)
LONGEST_NOTICE_S = 30 * 86400


def window_plan(
    *,
    acting_user: Actor,
    title: str,
    reason: str,
    starts_at: datetime,
    ends_at: datetime,
    notice_s: int,
    site: Site | None = None,
    nodes: Sequence[Node] = (),
) -> MaintenanceWindow:
    """Plan a window for some nodes, or for a whole site. Pool administrators; Invalid names each bad field."""
    require_pool_admin(acting_user)
    at = now()
    problems: list[FieldProblem] = []

    def wrong(field: str, detail: object) -> None:
        problems.append({"pointer": field, "detail": detail})  # type: ignore[typeddict-item]

    if not 0 < len(title.strip()) <= 120:
        wrong("title", _("A title of 1 to 120 characters is needed."))
    if not reason.strip():
        wrong("reason", _("Say why: people with work on these nodes will read it."))
    if ends_at <= starts_at:
        wrong("ends_at", _("It ends before it begins."))
    elif ends_at <= at:
        wrong("ends_at", _("The end lies in the past."))
    elif ends_at - starts_at > LONGEST:
        wrong("ends_at", _("A window lasts 90 days at most."))
    if not 0 <= notice_s <= LONGEST_NOTICE_S:
        wrong("notice_s", _("The notice lies between 0 and 30 days."))
    if (site is None) == (not nodes):
        wrong("nodes", _("Name nodes, or a site."))
    if problems:
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=problems)
    with transaction.atomic():
        window = MaintenanceWindow.objects.create(
            title=title.strip(),
            reason=reason.strip(),
            site=site,
            starts_at=starts_at,
            ends_at=ends_at,
            notice_s=notice_s,
            made_by_name=acting_user.name,
        )
        MaintenanceNode.objects.bulk_create(
            MaintenanceNode(window=window, node=node) for node in {node.pk: node for node in nodes}.values()
        )
        audit_record(
            acting_user=acting_user,
            action="maintenance.planned",
            subject=window,
            after={
                "starts_at": starts_at.isoformat(),
                "ends_at": ends_at.isoformat(),
                "notice_s": notice_s,
                "site": site.code if site is not None else None,
                "nodes": [node.name for node in nodes],
            },
            reason=reason.strip(),
        )
        _tell(window)
    window_step(window_id=window.pk)
    window.refresh_from_db()
    return window


def window_cancel(*, acting_user: Actor, window: MaintenanceWindow, reason: str) -> MaintenanceWindow:
    """Call it off, or end it early: who is not stopped yet goes on, its nodes are opened again."""
    require_pool_admin(acting_user)
    if not reason.strip():
        raise Invalid.field("reason", _("Say why."), code="reason_missing")
    with transaction.atomic():
        before = window.state
        began = window.began_at is not None
        act = "end" if began else "cancel"
        if not move_window(
            window, act, ended_at=now(), ended_by_name=acting_user.name, end_reason=reason.strip()
        ):
            raise Conflict(
                code="wrong_state",
                detail=_("The window is over already."),
                extra={"state": str(window.state)},
            )
        audit_record(
            acting_user=acting_user,
            action="maintenance.ended" if began else "maintenance.cancelled",
            subject=window,
            before={"state": str(before)},
            after={"state": str(window.state)},
            reason=reason.strip(),
        )
        _open_nodes(window, acting_user)
        _tell(window)
    _withdraw_cases(window, acting_user)
    window.refresh_from_db()
    return window


def windows_sweep() -> dict[str, int]:
    """Bring every open window to where it should be by now; returns how many steps were taken."""
    done = {"announced": 0, "began": 0, "ended": 0, "told": 0}
    for pk in (
        MaintenanceWindow.objects.filter(state__in=WINDOW_OPEN)
        .order_by("starts_at", "id")
        .values_list("pk", flat=True)
    ):
        for name, count in window_step(window_id=pk).items():
            done[name] += count
    return done


def window_step(*, window_id: int) -> dict[str, int]:
    """Announce, begin or end one window as its times say, and tell whoever came onto its nodes since."""
    done = {"announced": 0, "began": 0, "ended": 0, "told": 0}
    at = now()
    window = MaintenanceWindow.objects.get(pk=window_id)
    if window.state not in WINDOW_OPEN:
        return done
    if at >= window.ends_at:
        done["ended"] += _end(window, at)
        return done
    if window.state == S.PLANNED and at >= window.starts_at - timedelta(seconds=window.notice_s):
        done["announced"] += move_window(window, "announce", announced_at=at)
    if window.state == S.ANNOUNCED and at >= window.starts_at:
        done["began"] += _begin(window, at)
    if window.state in (S.ANNOUNCED, S.RUNNING):
        done["told"] += _give_notice(window, at)
    return done


def nodes_of(window: MaintenanceWindow) -> QuerySet[Node]:
    """The nodes that a window is about; of a site those that are there now."""
    mine = Q(maintenance_rows__window=window)
    if window.site_id is not None:
        mine |= Q(cluster__site_id=window.site_id)
    return Node.objects.filter(mine).exclude(schedulable=Node.Schedulable.RETIRED).distinct().order_by("name")


def work_in_the_way(window: MaintenanceWindow) -> QuerySet[Allocation]:
    """Live allocations on its nodes that would still run at its start, oldest first."""
    on = AllocationMember.objects.filter(node__in=nodes_of(window), given_up_at=None).values("allocation_id")
    late = Q(expires_at=None) | Q(expires_at__gt=window.starts_at)
    return Allocation.objects.filter(late, pk__in=on, state__in=LIVE).order_by("id")


def _give_notice(window: MaintenanceWindow, at: datetime) -> int:
    """The ladder for all that is in the way and not told yet, so timed that it is gone when the window begins."""
    told = 0
    grace = max(0.0, (window.starts_at - at).total_seconds() - GRACE_S)
    waiting = work_in_the_way(window).exclude(
        pk__in=ReclaimCase.objects.filter(closed_at=None, grace_until__lte=window.starts_at).values(
            "allocation_id"
        )
    )
    for allocation in waiting:
        try:
            case = case_begin(
                acting_user=SYSTEM,
                allocation_id=allocation.pk,
                cause=ReclaimCase.Cause.MAINTENANCE,
                rule="maintenance_window",
                grace_s=round(grace),
                reason=window.reason,
                figures={
                    "window": window.ref,
                    "title": window.title,
                    "starts_at": window.starts_at.isoformat(),
                    "ends_at": window.ends_at.isoformat(),
                },
                window=window,
            )
        except DomainError:
            continue
        told += case.window_id == window.pk and case.noticed_at == at
    return told


def _begin(window: MaintenanceWindow, at: datetime) -> bool:
    with transaction.atomic():
        if not move_window(window, "begin", began_at=at):
            return False
        for node in nodes_of(window):
            row, _made = MaintenanceNode.objects.get_or_create(window=window, node=node)
            closed = advance(
                Node.objects.filter(pk=node.pk, schedulable=Node.Schedulable.OPEN),
                schedulable=Node.Schedulable.MAINTENANCE,
                schedulable_reason=window.reason,
                schedulable_since=at,
                schedulable_by_name=window.made_by_name,
                maintenance_until=window.ends_at,
            )
            if closed:
                MaintenanceNode.objects.filter(pk=row.pk).update(closed_at=at)
                _node_told(node, Node.Schedulable.MAINTENANCE, SYSTEM, window)
        capacity_refresh()
        _tell(window)
    return True


def _end(window: MaintenanceWindow, at: datetime) -> bool:
    with transaction.atomic():
        if not move_window(window, "end", ended_at=at, ended_by_name=SYSTEM.name):
            return False
        _open_nodes(window, SYSTEM)
        _tell(window)
    _withdraw_cases(window, SYSTEM)
    return True


def _open_nodes(window: MaintenanceWindow, actor: Actor) -> None:
    """Open what this window closed, unless people decided otherwise since, or another window goes on there."""
    at = now()
    rows = window.node_rows.filter(closed_at__isnull=False, reopened_at=None).select_related("node")
    others = MaintenanceNode.objects.filter(
        window__state=S.RUNNING, closed_at__isnull=False, reopened_at=None
    ).exclude(window=window)
    held = set(others.values_list("node_id", flat=True))
    for row in rows:
        MaintenanceNode.objects.filter(pk=row.pk).update(reopened_at=at)
        if row.node_id in held:
            continue
        opened = advance(
            Node.objects.filter(pk=row.node_id, schedulable=Node.Schedulable.MAINTENANCE),
            schedulable=Node.Schedulable.OPEN,
            schedulable_reason="",
            schedulable_since=at,
            schedulable_by_name=actor.name,
            maintenance_until=None,
        )
        if opened:
            _node_told(row.node, Node.Schedulable.OPEN, actor, window)
    capacity_refresh()


def _withdraw_cases(window: MaintenanceWindow, actor: Actor) -> int:
    rows = ReclaimCase.objects.filter(window=window, closed_at=None, step__in=WITHDRAWABLE).order_by(
        "allocation_id"
    )
    return sum(
        case_withdraw(acting_user=actor, case_id=pk, why="window_over")
        for pk in rows.values_list("pk", flat=True)
    )


def _node_told(node: Node, to: str, actor: Actor, window: MaintenanceWindow) -> None:
    audit_record(
        acting_user=actor,
        action="node.maintenance" if to == Node.Schedulable.MAINTENANCE else "node.uncordoned",
        subject=node,
        before={"schedulable": str(node.schedulable)},
        after={"schedulable": str(to), "window": window.ref},
        reason=window.reason,
    )
    outbox_add("pool.node_state", {"node_uid": str(node.uid), "schedulable": str(to)}, key=node.name)


def _tell(window: MaintenanceWindow) -> None:
    """What may be placed where has changed."""
    outbox_add(
        "pool.capacity_changed",
        {"cause": "maintenance", "window": str(window.uid), "state": str(window.state)},
    )
