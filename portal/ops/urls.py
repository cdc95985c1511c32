"""Pages of this room."""

from __future__ import annotations

from typing import Any

from django.urls import path

from portal.ops.web import audit, incidents

app_name = "ops"
urlpatterns: list[Any] = [
    path("audit/", audit.audit, name="audit"),
    path("audit/export.csv", audit.audit_export, name="audit_export"),
    path("incidents/", incidents.incidents, name="incidents"),
    path("incidents/<uuid:uid>/", incidents.incident, name="incident"),
    path("incidents/<uuid:uid>/take/", incidents.incident, {"act": "take"}, name="incident_take"),
    path("incidents/<uuid:uid>/note/", incidents.incident, {"act": "note"}, name="incident_note"),
    path("incidents/<uuid:uid>/close/", incidents.incident, {"act": "close"}, name="incident_close"),
]
