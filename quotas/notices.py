"""What people are told of their series, deadlines and what their requests wait for: each once."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.utils.translation import gettext_lazy as _

from portal.notify import kinds
from portal.notify.services import notify
from portal.ops.outbox import subscribe
from quotas.models import CapacityRequest

LEFT = {7 * 86400: _("7 days"), 86400: _("1 day")}


def _left(params: kinds.Params) -> kinds.Params:
    return {**params, "left": LEFT.get(params.get("threshold_s", 0), params.get("threshold_s"))}


kinds.register(
    "quotas.review_due",
    _("%(ref)s: its review date is in less than %(left)s"),
    _("The service stops at %(review_at)s unless you renew it."),
    urgent=True,
    group="taken",
    label=_("My service needs a renewal"),
    tone="warn",
    icon="clock",
    action=_("Renew"),
    prepare=_left,
)
kinds.register(
    "quotas.deadline_lost",
    _("%(ref)s cannot be finished by %(deadline_at)s any more"),
    _(
        "Even if it began now it would end at %(earliest_end)s. It stays in line; change or withdraw it there."
    ),
    group="request",
    label=_("My request cannot meet its deadline"),
    tone="bad",
    icon="warn",
)
kinds.register(
    "quotas.dependency_failed",
    _("%(ref)s: %(on)s did not end well"),
    _("%(ref)s was to start after it."),
    urgent=True,
    group="job",
    label=_("What my request waits for failed"),
    tone="bad",
    icon="fault",
)
kinds.register(
    "quotas.window_missed",
    _("%(ref)s: the window of %(start_at)s passed"),
    _("Its GPUs did not come free in time. The other windows stay as they are."),
    urgent=True,
    group="request",
    label=_("A reserved window of mine passed unused"),
    tone="bad",
    icon="calendar",
)
kinds.register(
    "quotas.crash_loop",
    _("%(ref)s: its replicas fail one after another"),
    _("%(failed)s ended with an error within ten minutes. The next one starts at %(again_at)s."),
    urgent=True,
    group="job",
    label=_("My service fails again and again"),
    tone="bad",
    icon="fault",
)


def _tell(payload: dict[str, Any], kind: str, threshold: str, moments: tuple[str, ...] = ()) -> None:
    request = CapacityRequest.objects.filter(uid=payload["request"]).first()
    if request is None:
        return
    params = {name: value for name, value in payload.items() if name != "request"}
    params |= {name: datetime.fromisoformat(payload[name]) for name in moments}
    if request.start_at is not None:
        params["start_at"] = request.start_at
    subject = request.head if request.head is not None else request
    notify(
        user_ids=[request.requester_id],
        kind=kind,
        subject=request,
        threshold=threshold,
        params={"ref": request.ref, **params},
        url=f"/requests/{subject.uid}/",
    )


def on_review_due(payload: dict[str, Any]) -> None:
    """The review date comes near: once per threshold and date."""
    threshold = f"{payload['threshold_s']}s {payload['review_at'][:16]}"
    _tell(payload, "quotas.review_due", threshold, ("review_at",))


def on_deadline_lost(payload: dict[str, Any]) -> None:
    """A deadline cannot be met any more: once per deadline."""
    moments = ("deadline_at", "earliest_end")
    _tell(payload, "quotas.deadline_lost", payload["deadline_at"][:16], moments)


def on_dependency_failed(payload: dict[str, Any]) -> None:
    """What it waits for did not end well: once per such request."""
    _tell(payload, "quotas.dependency_failed", str(payload["on"]))


def on_window_missed(payload: dict[str, Any]) -> None:
    """A window passed before it could start."""
    _tell(payload, "quotas.window_missed", "missed")


def on_crash_loop(payload: dict[str, Any]) -> None:
    """Replicas fail one after another: once per pause."""
    _tell(payload, "quotas.crash_loop", payload["again_at"][:16], ("again_at",))


subscribe("quotas.review_due", "quotas.notices.on_review_due")
subscribe("quotas.deadline_lost", "quotas.notices.on_deadline_lost")
subscribe("quotas.dependency_failed", "quotas.notices.on_dependency_failed")
subscribe("quotas.window_missed", "quotas.notices.on_window_missed")
subscribe("quotas.crash_loop", "quotas.notices.on_crash_loop")
