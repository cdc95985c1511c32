"""The queue as the scheduler reads it."""

from __future__ import annotations

from django.db.models import QuerySet

from quotas.models import CapacityRequest


def queued_requests() -> QuerySet[CapacityRequest]:
    """Requests that wait for GPUs, oldest place first; a requeued one kept its place. Asks whose window
    begins later are among them: the scheduler plans for windows. What is held (it waits for another request,
    or for its turn in an array) is not in line.
    """
    return (
        CapacityRequest.objects.filter(state=CapacityRequest.State.QUEUED, held="")
        .select_related("flavour", "department", "requester")
        .order_by("queued_at", "id")
    )
