"""What people do about a finding: tell who wastes, dismiss with a reason, take up again, open an incident."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import Q
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from monitoring.models import Finding, FindingEntry
from pool.models import Gpu
from portal.accounts.models import Role, User
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid
from portal.kernel.models import advance
from portal.notify.services.notices import notify
from portal.ops.actor import Actor
from portal.ops.models import Incident
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record
from portal.ops.services.incidents import incident_open

TELL, DISMISS, REOPEN, INCIDENT = "tell", "dismiss", "reopen", "incident"
ACTS = (TELL, DISMISS, REOPEN, INCIDENT)


INCIDENTS = {
    Finding.Kind.THROTTLED.value: "gpu_throttled",
    Finding.Kind.STRANDED.value: "gpu_stranded",
}
"""What operators take up as an incident: heat to be looked at, a layout to be made anew. By its key health (heat) or
the finding's end (layout) closes it."""


def incident_key(kind: str, card: Gpu) -> str:
    """The key of the incident of such a finding on this card."""
    return f"{INCIDENTS[kind]}:{card.uid}"


def may_act(policy: Policy, finding: Finding) -> bool:
    """Pool administrators on all findings, leads on those of their departments."""
    if policy.administers_pool:
        return True
    return finding.department_id is not None and policy.holds(Role.LEAD, finding.department_id)


def acts_of(policy: Policy, finding: Finding) -> list[str]:
    """Acts that are open to the reader now, the helping one first."""
    if finding.state == Finding.State.CLOSED or not may_act(policy, finding):
        return []
    if finding.state == Finding.State.DISMISSED:
        return [REOPEN]
    acts = []
    if finding.kind in INCIDENTS and policy.administers_pool:
        acts.append(INCIDENT)
    if finding.kind != Finding.Kind.STRANDED and finding.told_at is None and addressees(finding):
        acts.append(TELL)
    return [*acts, DISMISS]


def addressees(finding: Finding) -> list[int]:
    """Ids of who is to be told: the holder, or the people whose accounts run the processes without a lease."""
    if finding.kind != Finding.Kind.NO_LEASE:
        return [finding.holder_id] if finding.holder_id else []
    accounts = [str(name) for name in finding.evidence.get("users", [])]
    own = Q(system_account__in=accounts) | Q(system_account="", username__in=accounts)
    found = User.objects.filter(own, is_active=True)
    return sorted(set(found.values_list("pk", flat=True)))


def finding_act(
    *, acting_user: Actor, policy: Policy, finding: Finding, act: str, reason: str = ""
) -> Finding:
    """One act on one finding; a finding that is closed takes none."""
    policy.require(may_act(policy, finding))
    if act not in ACTS:
        raise Invalid.field("act", _("One of: %(known)s.") % {"known": ", ".join(ACTS)})
    with transaction.atomic():
        locked = Finding.objects.select_for_update().get(pk=finding.pk)
        if locked.state == Finding.State.CLOSED:
            raise Conflict(code="finding_closed", detail=_("This finding is closed: it is no longer so."))
        if act == TELL:
            facts = _tell(acting_user, locked)
        elif act == DISMISS:
            facts = _dismiss(locked, reason)
        elif act == REOPEN:
            facts = _reopen(locked)
        else:
            policy.require(policy.administers_pool)
            facts = _incident(locked)
        FindingEntry.objects.create(
            finding=locked,
            at=now(),
            kind=_DONE[act],
            actor_name=acting_user.name,
            text=reason.strip()[:500],
            facts=facts,
        )
        audit_record(
            acting_user=acting_user,
            action=f"finding.{_DONE[act]}",
            subject=locked,
            after=facts,
            reason=reason.strip()[:500],
        )
        outbox_add("monitoring.finding_acted", {"finding": str(locked.uid), "act": act}, key=locked.ref)
        locked.refresh_from_db()
    return locked


_DONE = {TELL: "told", DISMISS: "dismissed", REOPEN: "reopened", INCIDENT: "incident"}


def _tell(acting_user: Actor, row: Finding) -> dict[str, Any]:
    if row.told_at is not None:
        raise Conflict(code="told_already", detail=_("They were told of this already."))
    people = addressees(row)
    if not people:
        raise Conflict(code="nobody_to_tell", detail=_("No account of a person here matches it."))
    params: dict[str, Any] = {
        "ref": row.ref,
        "what": row.kind,
        "rule": row.rule,
        "subject": row.subject_label,
        "gpu_ms": row.gpu_ms,
        "micro": row.micro,
        "since": row.since,
        "part": row.evidence.get("part", ""),
        "flavour": row.evidence.get("flavour", ""),
        "unused": row.evidence.get("unused", 0),
    }
    notify(
        user_ids=people,
        kind="monitoring.finding",
        subject=row,
        params=params,
        url=reverse("monitoring:finding", args=[row.uid]),
    )
    advance(Finding.objects.filter(pk=row.pk), told_at=now(), told_by_name=acting_user.name)
    return {"people": len(people)}


def _dismiss(row: Finding, reason: str) -> dict[str, Any]:
    if not reason.strip():
        raise Invalid.field("reason", _("Say in a sentence why it is no waste."))
    if not advance(Finding.objects.filter(pk=row.pk, state="open"), state=Finding.State.DISMISSED):
        raise Conflict(code="finding_dismissed", detail=_("This finding is dismissed already."))
    return {"state": "dismissed"}


def _reopen(row: Finding) -> dict[str, Any]:
    if not advance(Finding.objects.filter(pk=row.pk, state="dismissed"), state=Finding.State.OPEN):
        raise Conflict(code="finding_open", detail=_("This finding is open."))
    return {"state": "open"}


def _incident(row: Finding) -> dict[str, Any]:
    card = row.gpu
    if row.kind not in INCIDENTS or card is None:
        raise Conflict(code="no_incident", detail=_("This kind of finding is no fault of a card."))
    opened = incident_open(
        kind=INCIDENTS[row.kind],
        dedupe_key=incident_key(row.kind, card),
        severity=Incident.Severity.WARNING if row.kind == Finding.Kind.THROTTLED else Incident.Severity.INFO,
        subject=card,
        facts={**row.evidence, "rule": row.rule, "finding": row.ref},
    )
    return {"incident": f"I-{opened.pk}"}
