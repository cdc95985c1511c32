"""Services of portal.ops: audit_record, incidents, outbox delivery, task runs."""

from portal.ops.services.audit import audit_record
from portal.ops.services.incidents import (
    incident_acknowledge,
    incident_close,
    incident_note,
    incident_open,
    incident_resolve,
)
from portal.ops.services.runs import task_run

__all__ = [
    "audit_record",
    "incident_acknowledge",
    "incident_close",
    "incident_note",
    "incident_open",
    "incident_resolve",
    "task_run",
]
