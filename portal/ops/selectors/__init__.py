"""What is read of the operations log."""

from portal.ops.selectors.audit import audit_filtered, audit_total, audit_visible, history_of, same_request
from portal.ops.selectors.incidents import incidents_visible

__all__ = [
    "audit_filtered",
    "audit_total",
    "audit_visible",
    "history_of",
    "incidents_visible",
    "same_request",
]
