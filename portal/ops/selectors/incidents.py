"""Incidents."""

from __future__ import annotations

from django.db.models import Case, IntegerField, QuerySet, Value, When

from portal.ops.models import Incident
from portal.ops.selectors.audit import Reader

_ORDER = Case(
    When(severity="critical", then=Value(0)),
    When(severity="warning", then=Value(1)),
    default=Value(2),
    output_field=IntegerField(),
)


def incidents_visible(policy: Reader, state: str = "") -> QuerySet[Incident]:
    """For pool administrators and auditors of the installation. `state`: open (not closed), closed, or all."""
    if not policy.scope("pool_admin", "auditor").everything:
        return Incident.objects.none()
    rows = Incident.objects.all()
    if state == "open":
        rows = rows.exclude(state=Incident.State.CLOSED)
        return rows.order_by(_ORDER, "-opened_at", "-id")
    if state == "closed":
        rows = rows.filter(state=Incident.State.CLOSED)
    return rows.order_by("-opened_at", "-id")
