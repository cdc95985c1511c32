"""Open, repeat, acknowledge and close incidents."""

from __future__ import annotations

from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils.translation import gettext_lazy as _

from portal.kernel.clock import now
from portal.kernel.errors import Conflict, Invalid
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.models import Incident, IncidentEntry
from portal.ops.outbox import outbox_add
from portal.ops.services.audit import audit_record


def incident_open(
    *,
    kind: str,
    dedupe_key: str,
    severity: str = Incident.Severity.WARNING,
    subject: Any = None,
    facts: dict[str, Any] | None = None,
) -> Incident:
    """Open an incident, or note another sighting of the open one with the same key."""
    with transaction.atomic():
        found = (
            Incident.objects.select_for_update().filter(dedupe_key=dedupe_key).exclude(state="closed").first()
        )
        if found is None:
            try:
                with transaction.atomic():
                    made = Incident.objects.create(
                        kind=kind,
                        dedupe_key=dedupe_key,
                        severity=severity,
                        subject_type=subject._meta.label_lower if subject is not None else "",
                        subject_uid=getattr(subject, "uid", None),
                        subject_label=str(subject)[:200] if subject is not None else "",
                        facts=facts or {},
                        opened_at=now(),
                        last_seen_at=now(),
                    )
                    outbox_add(
                        "ops.incident_opened", {"incident": str(made.uid), "kind": kind}, key=dedupe_key[:100]
                    )
                    return made
            except IntegrityError:
                found = (
                    Incident.objects.select_for_update()
                    .filter(dedupe_key=dedupe_key)
                    .exclude(state="closed")
                    .get()
                )
        advance(
            Incident.objects.filter(pk=found.pk),
            occurrences=F("occurrences") + 1,
            last_seen_at=now(),
            facts=facts or found.facts,
        )
        found.refresh_from_db()
        return found


def incident_note(
    *, incident: Incident, kind: str, actor: Actor, text: str = "", facts: dict[str, Any] | None = None
) -> None:
    """Add one entry to an incident's story."""
    IncidentEntry.objects.create(
        incident=incident, at=now(), kind=kind, actor_name=actor.name, text=text, facts=facts or {}
    )


def incident_acknowledge(*, acting_user: Actor, incident: Incident) -> Incident:
    """Somebody takes it: open → acknowledged. The caller has checked the person's role."""
    with transaction.atomic():
        if not advance(Incident.objects.filter(pk=incident.pk, state="open"), state="acknowledged"):
            raise Conflict(code="incident_taken", detail=_("This incident is taken or closed already."))
        incident.refresh_from_db()
        incident_note(incident=incident, kind="acknowledged", actor=acting_user)
        audit_record(
            acting_user=acting_user,
            action="incident.acknowledged",
            subject=incident,
            before={"state": "open"},
            after={"state": "acknowledged"},
        )
        return incident


def incident_close(*, acting_user: Actor, incident: Incident, note: str) -> Incident:
    """Close with a note (required from people). The caller has checked the person's role."""
    if not note.strip():
        raise Invalid.field("note", _("Say in a sentence what was found and done."))
    with transaction.atomic():
        changed = advance(
            Incident.objects.filter(pk=incident.pk).exclude(state="closed"),
            state="closed",
            closed_at=now(),
            closed_by_name=acting_user.name,
            note=note.strip(),
        )
        if not changed:
            raise Conflict(code="incident_closed", detail=_("This incident is closed already."))
        incident.refresh_from_db()
        incident_note(incident=incident, kind="closed", actor=acting_user, text=note.strip())
        audit_record(acting_user=acting_user, action="incident.closed", subject=incident, reason=note.strip())
        return incident


def incident_resolve(*, dedupe_key: str, note: str) -> bool:
    """The system saw the cause gone: close the open incident of this key, if any."""
    found = Incident.objects.filter(dedupe_key=dedupe_key).exclude(state="closed").first()
    if found is None:
        return False
    with transaction.atomic():
        advance(
            Incident.objects.filter(pk=found.pk).exclude(state="closed"),
            state="closed",
            closed_at=now(),
            closed_by_name="system",
            note=note,
        )
    return True
