"""The states of an allocation, of its members, of what takes it back, and every arrow between them, as data.

``ALLOCATION_ARROWS[act] = (states it may be done in, state it leads to)``. ``take`` is the only code that
changes an allocation's state: a conditional UPDATE on state and version, so of two that come at once one
wins.
"""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from pool.models import Allocation, AllocationMember, MaintenanceWindow, ReclaimCase
from portal.kernel.clock import now
from portal.kernel.errors import Conflict
from portal.kernel.models import advance

A = Allocation.State
M = AllocationMember.State

ALLOCATION_ARROWS: dict[str, tuple[frozenset[str], str]] = {
    "start": (frozenset({A.RESERVED}), A.STARTING),
    "run": (frozenset({A.RESERVED, A.STARTING}), A.RUNNING),
    "stop": (frozenset({A.RESERVED, A.STARTING, A.RUNNING}), A.STOPPING),
    "end": (frozenset({A.STOPPING}), A.ENDED),
}
LIVE = frozenset({A.RESERVED, A.STARTING, A.RUNNING})
REQUEUE = "requeue"
"""`end_rule` of an allocation whose request goes back to its old place."""
C = ReclaimCase.Step
RECLAIM_ARROWS: dict[str, tuple[frozenset[str], str]] = {
    "hook": (frozenset({C.NOTICE}), C.CHECKPOINT),
    "stop": (frozenset({C.NOTICE, C.CHECKPOINT}), C.STOPPING),
    "free": (frozenset({C.NOTICE, C.CHECKPOINT, C.STOPPING}), C.FREED),
    "fence": (frozenset({C.NOTICE, C.CHECKPOINT, C.STOPPING}), C.FENCED),
    "withdraw": (frozenset({C.NOTICE, C.CHECKPOINT}), C.WITHDRAWN),
}
WITHDRAWABLE = RECLAIM_ARROWS["withdraw"][0]
W = MaintenanceWindow.State
WINDOW_ARROWS: dict[str, tuple[frozenset[str], str]] = {
    "announce": (frozenset({W.PLANNED}), W.ANNOUNCED),
    "begin": (frozenset({W.ANNOUNCED}), W.RUNNING),
    "end": (frozenset({W.PLANNED, W.ANNOUNCED, W.RUNNING}), W.ENDED),
    "cancel": (frozenset({W.PLANNED, W.ANNOUNCED, W.RUNNING}), W.CANCELLED),
}
WINDOW_OPEN = frozenset({W.PLANNED, W.ANNOUNCED, W.RUNNING})
MEMBER_LIVE = frozenset({M.RESERVED, M.STARTING, M.RUNNING})
MEMBER_GONE = frozenset({M.EXITED, M.FREE, M.LOST})


def may(act: str, state: str) -> bool:
    """Whether an allocation in ``state`` may take ``act``."""
    return state in ALLOCATION_ARROWS[act][0]


def take(allocation: Allocation, act: str, **values: object) -> Allocation:
    """Take one arrow; Conflict where the allocation is in another state or was changed meanwhile.

    The instance is brought up to date either way.
    """
    sources, target = ALLOCATION_ARROWS[act]
    rows = Allocation.objects.filter(pk=allocation.pk, state__in=sources, version=allocation.version)
    done = advance(rows, state=target, state_since=now(), **values)
    allocation.refresh_from_db()
    if not done:
        raise Conflict(
            code="wrong_state",
            detail=_("It is not in a state that allows this any more."),
            extra={"state": str(allocation.state), "act": act},
        )
    return allocation


def climb(case: ReclaimCase, act: str, **values: object) -> bool:
    """Take one arrow of the ladder; False where the case is at another step by now.

    The caller holds the allocation's row. The instance is brought up to date either way.
    """
    sources, target = RECLAIM_ARROWS[act]
    done = advance(ReclaimCase.objects.filter(pk=case.pk, step__in=sources), step=target, **values)
    case.refresh_from_db()
    return bool(done)


def move_window(window: MaintenanceWindow, act: str, **values: object) -> bool:
    """Take one arrow of a maintenance window; False where it is in another state by now."""
    sources, target = WINDOW_ARROWS[act]
    done = advance(MaintenanceWindow.objects.filter(pk=window.pk, state__in=sources), state=target, **values)
    window.refresh_from_db()
    return bool(done)
