"""Requests up to the queue: drafted, submitted, changed, consented to, withdrawn, cloned.

Extension and early release belong to the allocation, hence to the pool. Every write: permission, arrow of
``quotas.transitions``, audit, history, outbox in one transaction. Lock order: request, steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import User
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid, Refused
from portal.kernel.locks import lock_in_transaction
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record
from quotas.models import CapacityRequest, RequestEvent
from quotas.services.approval_steps import steps_make, steps_skip
from quotas.services.asking import read_request
from quotas.services.dependencies import LOCK as DEPENDENCIES
from quotas.services.dependencies import dependencies_set, give_up, hold_of
from quotas.services.history import note_event
from quotas.services.judging import JUDGED_FIELDS, Judged, judge
from quotas.services.locks import request_lock
from quotas.services.series import series_begin, series_close
from quotas.services.user_limits import queue_room_check
from quotas.services.wishes import copied_of, told, wishes_of
from quotas.transitions import REQUEST_ARROWS, allowed, move, refused

S = CapacityRequest.State


def request_save_draft(
    *,
    acting_user: Actor,
    policy: Policy,
    values: Mapping[str, Any],
    request: CapacityRequest | None = None,
    cloned_from: CapacityRequest | None = None,
) -> CapacityRequest:
    """Keep a draft: what is empty may stay empty, what is wrong is refused. A returned request stays
    returned.
    """
    user = _person(acting_user)
    _own_only(request, user)
    cleaned = read_request(values, user=user, policy=policy, draft=True)
    flavours = cleaned.pop("flavours")
    after = cleaned.pop("after")
    cleaned["options"] = [f.code for f in flavours] if cleaned.get("flavour") is None else []
    with transaction.atomic():
        lock_in_transaction(DEPENDENCIES)
        if request is None:
            made = CapacityRequest.objects.create(
                requester=user, last_editor=user, cloned_from=cloned_from, state_since=now(), **cleaned
            )
            note_event(
                request_id=made.pk, kind="drafted", actor_name=acting_user.name, facts=_origin(cloned_from)
            )
        else:
            held = _own(request, user)
            made = move(held, "save", last_editor_id=user.pk, **cleaned)
        dependencies_set(made, after)
        audit_record(acting_user=acting_user, action="request.drafted", subject=made, after=told(made))
        return made


def request_submit(
    *,
    acting_user: Actor,
    policy: Policy,
    values: Mapping[str, Any] | None = None,
    request: CapacityRequest | None = None,
    client_token: str = "",
    cloned_from: CapacityRequest | None = None,
) -> CapacityRequest:
    """Ask: new values, a draft as it is, or a draft with new values. Comes back in approval, or queued where
    the policy needs nobody.

    The same ``client_token`` of the same person gives the same request, however often and from wherever it is
    sent. Raises Invalid (fields), Blocked (could never start, or the policy refuses), Conflict (state, or
    `sent_already`: the token came before with other wishes).
    """
    user = _person(acting_user)
    if client_token and request is None:
        before = CapacityRequest.objects.filter(requester=user, client_token=client_token[:64]).first()
        if before is not None:
            return _sent_again(before, values or {}, user, policy)
    _own_only(request, user)
    sent = values if values is not None else copied_of(request)
    cleaned = read_request(sent, user=user, policy=policy)
    judged = judge(cleaned, user=user, policy=policy)
    fields = {**_fields(cleaned), **judged.fields}
    try:
        with transaction.atomic():
            lock_in_transaction(DEPENDENCIES)
            queue_room_check(user=user, more=max(1, cleaned["array_count"]), but_not=request)
            if request is None:
                made = CapacityRequest.objects.create(
                    requester=user,
                    last_editor=user,
                    client_token=client_token[:64],
                    cloned_from=cloned_from,
                    state_since=now(),
                    **fields,
                )
            else:
                made = _own(request, user)
                advance(CapacityRequest.objects.filter(pk=made.pk), last_editor_id=user.pk, **fields)
                made.refresh_from_db()
            move(made, "submit", submitted_at=now(), decided_at=None, queued_at=None)
            dependencies_set(made, cleaned["after"])
            facts = {**told(made), **judged.facts, **_origin(made.cloned_from)}
            note_event(request_id=made.pk, kind="submitted", actor_name=acting_user.name, facts=facts)
            audit_record(acting_user=acting_user, action="request.submitted", subject=made, after=facts)
            outbox_add("quotas.request_submitted", {"request": str(made.uid)}, key=made.ref)
            _open_steps(made, judged)
            return made
    except IntegrityError:
        twin = CapacityRequest.objects.filter(requester=user, client_token=client_token[:64]).first()
        if not client_token or twin is None:
            raise
        return _sent_again(twin, sent, user, policy)


def request_change(
    *,
    acting_user: Actor,
    policy: Policy,
    request: CapacityRequest,
    values: Mapping[str, Any],
    version: int | None = None,
) -> CapacityRequest:
    """Change an undecided request: what was agreed before counts no more, a new round of steps begins."""
    user = _person(acting_user)
    _own_only(request, user)
    cleaned = read_request(values, user=user, policy=policy)
    with transaction.atomic():
        lock_in_transaction(DEPENDENCIES)
        held = _own(request, user)
        _version(held, version)
        if not allowed("change", held.state):
            raise refused(held.state, "change", held.get_state_display())
        judged = judge(cleaned, user=user, policy=policy)
        before = told(held)
        fields = {**_fields(cleaned), **judged.fields}
        move(
            held,
            "change",
            last_editor_id=user.pk,
            consent_change={},
            submitted_at=now(),
            decided_at=None,
            **fields,
        )
        dependencies_set(held, cleaned["after"])
        after = told(held)
        changed = {key: [before[key], after[key]] for key in after if before[key] != after[key]}
        facts = {"changed": changed, **judged.facts}
        note_event(request_id=held.pk, kind="changed", actor_name=acting_user.name, facts=facts)
        audit_record(
            acting_user=acting_user,
            action="request.changed",
            subject=held,
            before={key: pair[0] for key, pair in changed.items()},
            after={key: pair[1] for key, pair in changed.items()},
        )
        outbox_add("quotas.request_changed", {"request": str(held.uid)}, key=held.ref)
        _open_steps(held, judged)
        return held


def request_withdraw(
    *,
    acting_user: Actor,
    policy: Policy,
    request: CapacityRequest,
    reason: str = "",
    version: int | None = None,
    stop_running: bool = True,
) -> CapacityRequest:
    """Take a request back that holds nothing yet; its requester or a pool administrator may. What runs is
    released on its allocation instead.

    A series is taken back whole: members that wait are withdrawn, and those that run are released, unless
    ``stop_running`` is False; the replicas of a service always are.
    """
    user = _person(acting_user)
    with transaction.atomic():
        held = request_lock(request.pk)
        _version(held, version)
        if held.requester_id != user.pk:
            policy.require(policy.administers_pool)
        if held.state == S.SERIES:
            if held.let_go_at is not None:
                raise refused(held.state, "withdraw", _("ending"))
            series_close(
                held,
                cause="withdrawn",
                acting_user=acting_user,
                stop_running=stop_running or held.is_service,
                reason=reason,
            )
            return held
        before = held.state
        move(held, "withdraw", ended_at=now(), end_reason="withdrawn", held="")
        steps_skip(held)
        note_event(
            request_id=held.pk,
            kind="withdrawn",
            actor_name=acting_user.name,
            facts={"from": before},
            text=reason,
        )
        audit_record(
            acting_user=acting_user,
            action="request.withdrawn",
            subject=held,
            before={"state": before},
            after={"state": held.state},
            reason=reason,
        )
        outbox_add("quotas.request_withdrawn", {"request": str(held.uid)}, key=held.ref)
        return held


def request_clone(*, acting_user: Actor, policy: Policy, request: CapacityRequest) -> CapacityRequest:
    """A draft with the same wishes, to change and submit; starts and review dates are left out, they have
    passed.
    """
    return request_save_draft(
        acting_user=acting_user, policy=policy, values=copied_of(request), cloned_from=request
    )


def _open_steps(request: CapacityRequest, judged: Judged) -> None:
    """Make the steps, or pass the request on where nobody needs to agree. Runs on an IN_APPROVAL request."""
    if judged.steps:
        steps_make(request, judged.steps)
    else:
        steps_skip(request)
        request_queue(request=request, rule=judged.rule, actor_name="policy")


def request_queue(*, request: CapacityRequest, rule: str, actor_name: str) -> CapacityRequest:
    """Every agreement is there: into the queue, or, for a series, its first members. What waits for others
    is held back from the line. The caller holds the request's lock inside a transaction.
    """
    moment = now()
    hold = hold_of(request)
    many = bool(request.series)
    move(
        request,
        "fan_out" if many else "approve",
        decided_at=moment,
        queued_at=moment,
        held="" if many else hold,
    )
    note_event(
        request_id=request.pk, kind="queued", actor_name=actor_name, facts={"rule": rule, "hold": hold}
    )
    payload = {"request": str(request.uid)}
    outbox_add("quotas.request_queued", {**payload, "cause": "approved"}, key=request.ref)
    outbox_add("quotas.request_decided", {**payload, "decision": "approved", "rule": rule}, key=request.ref)
    if many:
        series_begin(request, held=hold)
    if hold == "failed" and request.after_failed == CapacityRequest.AfterFailed.WITHDRAW:
        give_up(request, "dependency_failed")
    return request


def _person(acting_user: Actor) -> Any:
    if acting_user.user is None:
        raise Refused(code="person_needed", detail=_("Only a person can ask for GPUs."))
    return acting_user.user


def _own(request: CapacityRequest, user: Any) -> CapacityRequest:
    _own_only(request, user)
    return request_lock(request.pk)


def _own_only(request: CapacityRequest | None, user: Any) -> None:
    """A requester never changes, so this is told before the wishes are read."""
    if request is not None and request.requester_id != user.pk:
        raise Refused(code="not_yours", detail=_("Only its requester may change a request."))


def _version(held: CapacityRequest, version: int | None) -> None:
    if version is not None and held.version != version:
        raise Conflict(
            code="version_changed",
            detail=_("It was changed by somebody else meanwhile. Load it again and repeat the change."),
            extra={"current_version": held.version},
        )


def _fields(cleaned: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in cleaned.items() if key not in ("flavours", "after")}


def _sent_again(
    before: CapacityRequest, values: Mapping[str, Any], user: User, policy: Policy
) -> CapacityRequest:
    """The request that this token made before; Conflict where it now comes with other wishes than that has."""
    try:
        cleaned = read_request(values, user=user, policy=policy)
    except Invalid:
        return before  # sent late: what was right then may be refused now
    wishes = {key: value for key, value in _fields(cleaned).items() if key not in JUDGED_FIELDS}
    if any(_plain(getattr(before, key)) != _plain(value) for key, value in wishes.items()):
        raise Conflict(
            code="sent_already",
            detail=_(
                "This was sent already and made {ref}; what you changed since is not in it. Send it anew to make a "
                "second request."
            ).format(ref=before.ref),
            extra={"request": str(before.uid)},
        )
    return before


def _plain(value: Any) -> Any:
    """A value as the database gives it back: what is kept as JSON has lists for tuples."""
    return json.loads(json.dumps(value)) if isinstance(value, dict | list | tuple) else value


def _origin(source: CapacityRequest | None) -> dict[str, Any]:
    return {"cloned_from": source.ref} if source is not None else {}


__all__ = [
    "REQUEST_ARROWS", "RequestEvent", "request_change", "request_clone", "request_queue",
    "request_save_draft", "request_submit", "request_withdraw", "wishes_of",
]  # fmt: skip
