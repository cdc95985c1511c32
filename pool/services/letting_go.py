"""What a request's owner or its series gives back is ended here: told by quotas, done by the usual stop."""

from __future__ import annotations

from pool.models import Allocation, ReclaimCase
from pool.services import stopping
from pool.transitions import LIVE
from portal.kernel.errors import Conflict
from portal.ops.actor import system

QUEUE = system("queue")


def allocation_let_go(*, request_uid: str, cause: str) -> bool:
    """Release what a request holds, with its usual grace; False where it holds nothing (any more).

    ``cause`` is kept as the rule: scaled_down, review_passed, withdrawn.
    """
    row = Allocation.objects.filter(request__uid=request_uid, state__in=LIVE).order_by("-id").first()
    if row is None:
        return False
    try:
        stopping.stop(
            acting_user=QUEUE, allocation_id=row.pk, cause=ReclaimCase.Cause.RELEASED, rule=cause[:48]
        )
    except Conflict:
        return False
    return True
