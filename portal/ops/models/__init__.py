"""Models of portal.ops."""

from portal.ops.models.audit import AuditEvent
from portal.ops.models.idempotency import IdempotencyRecord
from portal.ops.models.incident import Incident, IncidentEntry
from portal.ops.models.outbox import OutboxEvent
from portal.ops.models.runs import TaskRun

__all__ = ["AuditEvent", "IdempotencyRecord", "Incident", "IncidentEntry", "OutboxEvent", "TaskRun"]
