"""The states of requests and quota changes, and every arrow between them, as data.

``REQUEST_ARROWS[act] = (states it may be done in, state it leads to)``; a service does ``move`` and nothing
else changes a state. ``TERMINAL`` states have no arrow out.
"""

from __future__ import annotations

from django.utils.translation import gettext as _

from portal.kernel.clock import now
from portal.kernel.errors import Conflict
from portal.kernel.models import advance
from quotas.models import CapacityRequest, QuotaChange

S = CapacityRequest.State
Q = QuotaChange.State

REQUEST_ARROWS: dict[str, tuple[frozenset[str], str | None]] = {
    "save": (frozenset({S.DRAFT, S.RETURNED}), None),
    "submit": (frozenset({S.DRAFT, S.RETURNED}), S.IN_APPROVAL),
    "change": (frozenset({S.IN_APPROVAL, S.RETURNED, S.NEEDS_CONSENT}), S.IN_APPROVAL),
    "approve": (frozenset({S.IN_APPROVAL}), S.QUEUED),
    "fan_out": (frozenset({S.IN_APPROVAL}), S.SERIES),
    "propose": (frozenset({S.IN_APPROVAL}), S.NEEDS_CONSENT),
    "consent": (frozenset({S.NEEDS_CONSENT}), S.IN_APPROVAL),
    "decline": (frozenset({S.NEEDS_CONSENT}), S.IN_APPROVAL),
    "return": (frozenset({S.IN_APPROVAL}), S.RETURNED),
    "reject": (frozenset({S.IN_APPROVAL}), S.REJECTED),
    "withdraw": (
        frozenset({S.DRAFT, S.IN_APPROVAL, S.RETURNED, S.NEEDS_CONSENT, S.QUEUED, S.SERIES}),
        S.WITHDRAWN,
    ),
    "allocate": (frozenset({S.QUEUED}), S.ALLOCATED),
    "start": (frozenset({S.ALLOCATED}), None),
    "extend": (frozenset({S.ALLOCATED}), None),
    "requeue": (frozenset({S.ALLOCATED}), S.QUEUED),
    "end": (frozenset({S.ALLOCATED}), S.ENDED),
    "finish": (frozenset({S.SERIES}), S.ENDED),
}
REQUEST_TERMINAL = frozenset({S.ENDED, S.REJECTED, S.WITHDRAWN})
REQUEST_OPEN = frozenset(set(S.values) - set(REQUEST_TERMINAL))

CHANGE_ARROWS: dict[str, tuple[frozenset[str], str | None]] = {
    "change": (frozenset({Q.IN_APPROVAL, Q.RETURNED}), Q.IN_APPROVAL),
    "approve": (frozenset({Q.IN_APPROVAL}), Q.APPROVED),
    "return": (frozenset({Q.IN_APPROVAL}), Q.RETURNED),
    "reject": (frozenset({Q.IN_APPROVAL}), Q.REJECTED),
    "withdraw": (frozenset({Q.IN_APPROVAL, Q.RETURNED}), Q.WITHDRAWN),
}


def allowed(act: str, state: str) -> bool:
    """Whether a request in ``state`` may do ``act``."""
    return state in REQUEST_ARROWS[act][0]


def refused(state: str, act: str, label: object) -> Conflict:
    """The error of an arrow that does not exist: says the present state and what may be done in it."""
    return Conflict(
        code="wrong_state",
        detail=_("It is “{state}” now, so that cannot be done any more.").format(state=label),
        extra={"state": str(state), "act": act, "possible": [a for a in REQUEST_ARROWS if allowed(a, state)]},
    )


def move(request: CapacityRequest, act: str, **values: object) -> CapacityRequest:
    """Take one arrow on a locked request by a conditional UPDATE; Conflict when it is not in a state that
    allows it or was changed meanwhile. The instance is brought up to date.
    """
    sources, target = REQUEST_ARROWS[act]
    if target is not None:
        values |= {"state": target, "state_since": now()}
    rows = CapacityRequest.objects.filter(pk=request.pk, state__in=sources, version=request.version)
    if not advance(rows, **values):
        request.refresh_from_db()
        raise refused(request.state, act, request.get_state_display())
    request.refresh_from_db()
    return request


def move_change(change: QuotaChange, act: str, **values: object) -> QuotaChange:
    """The same for a quota change."""
    sources, target = CHANGE_ARROWS[act]
    if target is not None:
        values["state"] = target
    rows = QuotaChange.objects.filter(pk=change.pk, state__in=sources, version=change.version)
    if not advance(rows, **values):
        change.refresh_from_db()
        raise refused(change.state, act, change.get_state_display())
    change.refresh_from_db()
    return change
