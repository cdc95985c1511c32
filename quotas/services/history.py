"""Lines of a request's history, written by the services beside the audit trail."""

from __future__ import annotations

from typing import Any

from portal.kernel.clock import now
from quotas.models import RequestEvent


def note_event(
    *, request_id: int, kind: str, actor_name: str, facts: dict[str, Any] | None = None, text: str = ""
) -> RequestEvent:
    """Add one line: a stable kind, who did it, its figures, and words where a person gave some."""
    return RequestEvent.objects.create(
        request_id=request_id, at=now(), kind=kind, actor_name=actor_name, facts=facts or {}, text=text
    )
