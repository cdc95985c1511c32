"""Celery tasks of portal.notify."""

from __future__ import annotations

from celery import shared_task

from portal.notify.services.deliver import deliver_due


@shared_task(name="portal.notify.deliver", queue="notify", ignore_result=True)
def deliver() -> int:
    """Send what is due; poked for urgent notices and run by beat for the others."""
    return deliver_due()
