"""Services roll over nodes: a replica whose node is to be emptied goes on until another stands elsewhere.

A drain or a maintenance window gives notice to all that runs on a node. For a replica of a service that notice is at
first a wish: its series asks for another replica at once, which is placed as any request is (so it needs room and quota
for one more), and the old one is stopped when the service has as many well replicas without it as it wants. Where that
never comes, the notice ends as any other does: stopped at its time, and the new one stands in line.

``replicas_roll`` may run at any time, any number of times, from a sweep and from news of replicas.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import Q

from pool.models import Allocation, AllocationEvent, AllocationMember, ReclaimCase
from pool.services.ladder import case_begin
from pool.transitions import LIVE, WITHDRAWABLE
from portal.kernel.clock import now
from portal.kernel.errors import Conflict
from portal.ops.actor import system
from quotas.models import CapacityRequest
from quotas.services.series import MOVING, replica_moves, replica_stays

SYSTEM = system("rules")
EMPTIES = ReclaimCase.Cause.MAINTENANCE
"""The cause of what takes work off a node: a drain, a maintenance window."""


def replicas_roll() -> dict[str, int]:
    """Bring all services whose replicas are told to leave their nodes where they should be; how many steps."""
    done = {"moving": 0, "stopped": 0, "stay": 0}
    noticed = ReclaimCase.objects.filter(
        closed_at=None,
        cause=EMPTIES,
        step__in=WITHDRAWABLE,
        members=[],
        allocation__state=Allocation.State.RUNNING,
    )
    served = Q(allocation__request__head__series=CapacityRequest.Series.SERVICE)
    told = noticed.filter(served, allocation__request__let_go_at=None, grace_until__gt=now())
    for case in told.select_related("allocation").order_by("id"):
        nodes = AllocationMember.objects.filter(allocation=case.allocation_id).values_list(
            "node__name", flat=True
        )
        facts = {
            "node": ", ".join(nodes),
            "until": case.grace_until.isoformat() if case.grace_until else None,
        }
        done["moving"] += replica_moves(request_id=case.allocation.request_id, facts=facts)
    moving = Allocation.objects.filter(state__in=LIVE, request__let_go_cause=MOVING)
    withdrawn = moving.exclude(pk__in=ReclaimCase.objects.filter(closed_at=None).values("allocation_id"))
    for request_id in withdrawn.order_by("request_id").values_list("request_id", flat=True):
        done["stay"] += replica_stays(request_id=request_id)
    leaving = noticed.filter(allocation__request__let_go_cause=MOVING).select_related(
        "allocation__request__head"
    )
    by_head: dict[int, list[ReclaimCase]] = {}
    for case in leaving.order_by("allocation__request__member_index", "id"):
        by_head.setdefault(case.allocation.request.head_id or 0, []).append(case)
    for cases in by_head.values():
        done["stopped"] += _stop_spare(cases)
    return done


def _stop_spare(cases: list[ReclaimCase]) -> int:
    """Stop as many leaving replicas of one service as it can do without: what stays and is well, and what leaves
    and still runs, is never fewer than the service wants."""
    head = cases[0].allocation.request.head
    assert head is not None
    staying = Allocation.objects.filter(
        request__head=head, request__let_go_at=None, state=Allocation.State.RUNNING
    ).exclude(pk__in=ReclaimCase.objects.filter(closed_at=None).values("allocation_id"))
    well = _well(staying, needs_word=bool(head.health))
    wanted = head.replicas_max if head.replicas_wanted is None else head.replicas_wanted
    # Who goes already (its end is the soonest, or has come) uses up the spare before anybody else does.
    due = sorted(
        (case for case in cases if case.grace_until is not None and case.grace_until > now()),
        key=lambda case: (case.grace_until, case.allocation.request.member_index or 0, case.pk),
    )
    spare = max(0, well + len(due) - wanted)
    stopped = 0
    for case in due[:spare]:
        try:
            case_begin(
                acting_user=SYSTEM,
                allocation_id=case.allocation_id,
                cause=case.cause,
                rule=case.rule,
                reason=case.text,
                figures=case.figures,
                window=case.window,
            )
        except Conflict:
            continue
        stopped += 1
    return stopped


def _well(allocations: Iterable[Allocation], *, needs_word: bool) -> int:
    """How many answer: those whose last health check succeeded; where there is no check, all."""
    rows = list(allocations)
    if not needs_word:
        return len(rows)
    last: dict[int, str] = {}
    events = AllocationEvent.objects.filter(allocation__in=rows, kind__in=("health_ok", "health_failed"))
    for pk, kind in events.order_by("id").values_list("allocation_id", "kind"):
        last[pk] = kind
    return sum(last.get(row.pk) == "health_ok" for row in rows)
