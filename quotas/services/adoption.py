"""A request for work that runs already: written down as asked and agreed to in one step, by an administrator's act.

It is judged like any other (department, flavour, limits of the person, quota, the approval policy's refusals); only
nobody is asked again, since whoever takes the work in answers for it. It is never in the line: the caller places it in
the same transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portal.accounts.models import User
from portal.accounts.policy import policy_of
from portal.kernel.clock import now
from portal.ops.actor import Actor
from portal.ops.services.audit import audit_record
from quotas.models import CapacityRequest
from quotas.services.asking import read_request
from quotas.services.history import note_event
from quotas.services.judging import judge
from quotas.services.wishes import told
from quotas.transitions import move

RULE = "adopted"


def request_adopt(
    *, acting_user: Actor, requester: User, values: Mapping[str, Any], facts: Mapping[str, Any]
) -> CapacityRequest:
    """The request, queued; inside the caller's transaction. Invalid (fields), Blocked (quota, policy, limits)."""
    policy = policy_of(requester)
    hold = CapacityRequest.RunKind.HOLD.value  # runs nothing of ours, so nothing of a command is asked for
    cleaned = read_request({**values, "run_kind": hold}, user=requester, policy=policy)
    judged = judge(cleaned, user=requester, policy=policy)
    fields = {key: value for key, value in cleaned.items() if key not in ("flavours", "after")}
    at = now()
    made = CapacityRequest.objects.create(
        requester=requester,
        last_editor=acting_user.user,
        state_since=at,
        **fields
        | judged.fields
        | {"run_kind": CapacityRequest.RunKind.ADOPTED, "command": "", "policy_rule": RULE},
    )
    move(made, "submit", submitted_at=at)
    move(made, "approve", decided_at=at, queued_at=at)
    note_event(request_id=made.pk, kind="adopted", actor_name=acting_user.name, facts=dict(facts))
    audit_record(
        acting_user=acting_user,
        action="request.adopted",
        subject=made,
        after={**told(made), **facts},
        department_id=made.department_id,
    )
    return made
