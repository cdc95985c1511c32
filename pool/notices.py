"""What people are told of their allocations: started, ending soon, being taken back, ended. From pool's own
events.

Each is told once per allocation (and per threshold and end), however often its event is delivered.
"""

from __future__ import annotations

from typing import Any

from django.urls import reverse
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext_lazy as _

from pool.models import Allocation, ReclaimCase
from pool.web.ladder_words import rule_words, withdrawn_words
from portal.notify import kinds
from portal.notify.services.notices import notify
from portal.ops.outbox import subscribe

LEFT = {
    3 * 86400: _("3 days"),
    86400: _("1 day"),
    3600: _("1 hour"),
    600: _("10 minutes"),
}


def _left(params: kinds.Params) -> kinds.Params:
    return {**params, "left": LEFT.get(params.get("threshold_s", 0), params.get("threshold_s"))}


def _reasons(params: kinds.Params) -> kinds.Params:
    ends, causes = dict(Allocation.EndReason.choices), dict(ReclaimCase.Cause.choices)
    reason, cause = params.get("reason", ""), params.get("cause", "")
    why = params.get("why") or rule_words(str(params.get("rule", "")))
    return {**params, "reason": ends.get(reason, reason), "cause": causes.get(cause, cause), "why": why}


def _withdrawn(params: kinds.Params) -> kinds.Params:
    return {**params, "why": withdrawn_words(str(params.get("why", "")))}


def _over(params: kinds.Params) -> kinds.Params:
    stops = params.get("policy") == "stop"
    what = _("It is ended unless it uses less.") if stops else _("Ask for a larger share, or use less.")
    return {**params, "what": str(what)}


kinds.register(
    "pool.allocation_started",
    _("%(ref)s runs on %(nodes)s"),
    _("%(request)s was started; its time ends at %(expires_at)s."),
    group="request",
    label=_("My work started"),
    tone="ok",
    icon="check",
)
kinds.register(
    "pool.lease_expiring",
    _("%(ref)s ends in less than %(left)s"),
    _("It ends at %(expires_at)s. Extend it there if it is still needed; what runs is stopped then."),
    group="taken",
    label=_("My lease ends soon"),
    tone="warn",
    icon="clock",
    action=_("Still needed"),
    prepare=_left,
)
kinds.register(
    "pool.allocation_reclaim",
    _("%(ref)s is taken back at %(grace_until)s"),
    _("Cause: %(cause)s. %(why)s"),
    urgent=True,
    group="taken",
    label=_("My GPUs are taken back"),
    tone="warn",
    icon="clock",
    prepare=_reasons,
)
kinds.register(
    "pool.allocation_idle",
    _("%(ref)s counts as idle"),
    _(
        "No activity on any of its GPUs since %(idle_since)s. It is taken back at %(taken_at)s, unless it is used or "
        "you say that it is still needed."
    ),
    urgent=True,
    group="taken",
    label=_("My GPUs count as idle"),
    tone="warn",
    icon="pause",
    action=_("Still needed"),
)
kinds.register(
    "pool.reclaim_withdrawn",
    _("%(ref)s keeps its GPUs"),
    _("It is not taken back: %(why)s."),
    group="taken",
    label=_("My GPUs are not taken back after all"),
    tone="ok",
    icon="check",
    prepare=_withdrawn,
)
kinds.register(
    "pool.allocation_ended",
    _("%(ref)s ended: %(reason)s"),
    _("%(request)s, exit code %(exit_code)s. %(detail)s"),
    group="request",
    label=_("My work ended"),
    tone="mute",
    icon="check",
    prepare=_reasons,
)
kinds.register(
    "pool.allocation_failed",
    _("%(ref)s failed: %(reason)s"),
    _("%(request)s, exit code %(exit_code)s. %(detail)s"),
    urgent=True,
    group="job",
    label=_("My work failed"),
    tone="bad",
    icon="fault",
    prepare=_reasons,
)
kinds.register(
    "pool.allocation_requeued",
    _("%(request)s is back in line at its old place"),
    _("%(ref)s ended: %(reason)s. %(detail)s"),
    urgent=True,
    group="job",
    label=_("My work went back in line"),
    tone="warn",
    icon="clock",
    prepare=_reasons,
)
kinds.register(
    "pool.over_share",
    _("%(ref)s uses more GPU memory than its share"),
    _("%(used_mib)s MiB of %(limit_mib)s MiB on %(node)s. %(what)s"),
    urgent=True,
    group="job",
    label=_("My work uses more than its share"),
    tone="warn",
    icon="memory",
    prepare=_over,
)

FAILED = frozenset({Allocation.EndReason.FAILED, Allocation.EndReason.START_FAILED})


def on_over_share(payload: dict[str, Any]) -> None:
    """Its memory is over its share: once for each time."""
    allocation = _allocation(payload)
    if allocation is not None:
        params = {name: payload.get(name) for name in ("used_mib", "limit_mib", "node", "policy")}
        _tell(allocation, "pool.over_share", params, threshold=_stamp(str(payload.get("told_at") or "")))


def on_idle(payload: dict[str, Any]) -> None:
    """It counts as idle: once per idle time."""
    allocation = _allocation(payload)
    if allocation is not None:
        params = {
            "idle_since": parse_datetime(payload["idle_since"]),
            "taken_at": parse_datetime(payload["taken_at"]),
        }
        _tell(allocation, "pool.allocation_idle", params, threshold=_stamp(payload["taken_at"]))


def on_withdrawn(payload: dict[str, Any]) -> None:
    """A notice was taken back. Who said “still needed” knows."""
    allocation = _allocation(payload)
    if allocation is not None and payload.get("why") != "still_needed":
        params = {"why": payload.get("why", "")}
        _tell(allocation, "pool.reclaim_withdrawn", params, threshold=str(payload.get("case", ""))[-12:])


def _allocation(payload: dict[str, Any]) -> Allocation | None:
    return Allocation.objects.select_related("request", "holder").filter(uid=payload["allocation"]).first()


def _tell(allocation: Allocation, kind: str, params: dict[str, Any], threshold: str = "") -> None:
    notify(
        user_ids=[allocation.holder_id],
        kind=kind,
        subject=allocation,
        threshold=threshold,
        params={"ref": allocation.ref, "request": allocation.request.ref, **params},
        url=reverse("pool:allocation", args=[allocation.uid]),
    )


def _stamp(moment: str) -> str:
    found = parse_datetime(moment)
    return str(int(found.timestamp())) if found is not None else ""


def on_started(payload: dict[str, Any]) -> None:
    """It runs."""
    allocation = _allocation(payload)
    if allocation is not None:
        params = {"nodes": ", ".join(payload.get("nodes", [])), "expires_at": allocation.expires_at}
        _tell(allocation, "pool.allocation_started", params)


def on_expiring(payload: dict[str, Any]) -> None:
    """It ends soon: once per threshold and end."""
    allocation = _allocation(payload)
    if allocation is not None:
        seconds, end = payload["threshold_s"], payload["expires_at"]
        params = {"threshold_s": seconds, "expires_at": parse_datetime(end)}
        _tell(allocation, "pool.lease_expiring", params, threshold=f"{seconds}s {_stamp(end)}")


def on_reclaim(payload: dict[str, Any]) -> None:
    """It is taken back after a notice."""
    allocation = _allocation(payload)
    if allocation is not None:
        params = {
            "cause": payload.get("cause"),
            "why": payload.get("reason", ""),
            "rule": payload.get("rule", ""),
            "grace_until": parse_datetime(payload["grace_until"]),
        }
        _tell(allocation, "pool.allocation_reclaim", params, threshold=_stamp(payload["grace_until"]))


def on_ended(payload: dict[str, Any]) -> None:
    """It ended, failed, or went back in line. What its holder gave back needs no notice."""
    allocation = _allocation(payload)
    if allocation is None or allocation.end_reason == Allocation.EndReason.RELEASED:
        return
    if payload.get("requeued"):
        kind = "pool.allocation_requeued"
    else:
        kind = "pool.allocation_failed" if allocation.end_reason in FAILED else "pool.allocation_ended"
    params = {
        "reason": allocation.end_reason,
        "exit_code": allocation.exit_code,
        "detail": allocation.error_detail[:300],
    }
    _tell(allocation, kind, params)


subscribe("pool.allocation_started", "pool.notices.on_started")
subscribe("pool.lease_expiring", "pool.notices.on_expiring")
subscribe("pool.allocation_reclaim", "pool.notices.on_reclaim")
subscribe("pool.allocation_ended", "pool.notices.on_ended")
subscribe("pool.allocation_idle", "pool.notices.on_idle")
subscribe("pool.reclaim_withdrawn", "pool.notices.on_withdrawn")
subscribe("pool.over_share", "pool.notices.on_over_share")
