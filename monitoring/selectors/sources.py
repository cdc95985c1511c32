"""Telemetry sources with what they cover, for pages and the API."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db.models import Count, F, Q, QuerySet
from django.utils.dateparse import parse_datetime

from monitoring.models import MetricSource, SourceCard
from portal.kernel.clock import now

OFF, NEVER, GOOD, BAD, OLD = "off", "never", "good", "bad", "old"


def sources_listed() -> QuerySet[MetricSource]:
    """All sources with `covered`: cards that were seen within the five minutes before the last fetch."""
    recent = Q(cards__seen_at__gte=F("last_at") - timedelta(minutes=5))
    return (
        MetricSource.objects.select_related("cluster")
        .annotate(covered=Count("cards", filter=recent))
        .order_by("-active", "name", "id")
    )


def source_state(source: MetricSource) -> str:
    """`off`; `never` fetched; `old`: due for long and not fetched (no worker runs); `good`; `bad`."""
    if not source.active:
        return OFF
    if source.last_at is None:
        return NEVER
    if now() - source.last_at > _patience(source):
        return OLD
    return GOOD if source.last_code == "ok" else BAD


def _patience(source: MetricSource) -> timedelta:
    return timedelta(seconds=max(300, 5 * source.every_s))


def silent_since(source: MetricSource) -> datetime | None:
    """Since when a source tells nothing or not all of it, once that is longer than a few fetches; else None."""
    state = source_state(source)
    if state == OLD:
        return source.last_at
    since = parse_datetime(str(source.last_facts.get("failing_since", ""))) if state == BAD else None
    return since if since is not None and now() - since > _patience(source) else None


def source_cards(source: MetricSource) -> QuerySet[SourceCard]:
    """The cards that a source told of, those seen last first."""
    return source.cards.select_related("gpu__node").order_by("-seen_at", "gpu__node__name", "gpu__index")
