"""Celery tasks of portal.ops."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module

from celery import shared_task
from django.conf import settings

from portal.kernel.clock import now
from portal.ops.models import IdempotencyRecord, OutboxEvent, TaskRun
from portal.ops.services.outbox import outbox_deliver


@shared_task(name="portal.ops.deliver_outbox", queue="notify", ignore_result=True)
def deliver_outbox() -> int:
    """Deliver what is due; poked after each commit and run by beat as a floor."""
    return outbox_deliver()


@shared_task(name="portal.ops.tidy", queue="reports", ignore_result=True)
def tidy() -> None:
    """Drop what has served its time: delivered events after 14 days, kept answers after 2, runs after 90,
    sessions that are over."""
    OutboxEvent.objects.filter(done_at__lt=now() - timedelta(days=14)).delete()
    IdempotencyRecord.objects.filter(created_at__lt=now() - timedelta(days=2)).delete()
    TaskRun.objects.filter(started_at__lt=now() - timedelta(days=90)).delete()
    import_module(settings.SESSION_ENGINE).SessionStore.clear_expired()
