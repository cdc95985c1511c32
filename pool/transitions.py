"""The states of an allocation and of its members, and every arrow between them, as data.

``ALLOCATION_ARROWS[act] = (states it may be done in, state it leads to)``. ``take`` is the only code that
changes an allocation's state: a conditional UPDATE on state and version, so of two that come at once one
wins.
"""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from pool.models import Allocation, AllocationMember
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
