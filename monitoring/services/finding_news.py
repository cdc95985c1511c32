"""What the pool did about leases with findings: warnings, “still needed”, advice, cases of taking back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from monitoring.models import Finding
from pool.models import AllocationEvent, ReclaimAdvice, ReclaimCase

News = tuple[Finding, datetime, str, str, dict[str, Any]]
_EVENTS = {"idle_warning": "warned", "still_needed": "still_needed"}


def news_of(rows: Sequence[Finding]) -> Iterator[News]:
    """(finding, when, kind, who, facts) of all that happened to their leases since each was found; three queries."""
    by_allocation = {row.allocation_id: row for row in rows}
    if not by_allocation:
        return
    events = AllocationEvent.objects.filter(allocation__in=by_allocation, kind__in=_EVENTS).order_by("id")
    for event in events:
        row = by_allocation[event.allocation_id]
        if event.at >= row.since:
            yield row, event.at, _EVENTS[event.kind], event.actor_name, dict(event.facts)
    for advice in ReclaimAdvice.objects.filter(allocation__in=by_allocation).order_by("id"):
        row = by_allocation[advice.allocation_id]
        if advice.last_at >= row.since:
            facts = {"cause": advice.cause, "rule": advice.rule, "mode": advice.mode}
            yield row, advice.first_at, "advised", "", facts
    for case in ReclaimCase.objects.filter(allocation__in=by_allocation).order_by("id"):
        row = by_allocation[case.allocation_id]
        at = case.noticed_at or case.created_at
        if at >= row.since:
            yield row, at, "reclaim", case.by_name, {"cause": case.cause, "rule": case.rule}
