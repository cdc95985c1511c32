"""Bases of the models: public ids, times, versions."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import F

from portal.kernel.clock import now
from portal.kernel.ids import uuid7


class PublicModel(models.Model):
    """A row that people see: `id` for joins and for the short reference (R-17), `uid` in URLs and API."""

    id = models.BigAutoField(primary_key=True)
    uid = models.UUIDField(default=uuid7, unique=True, editable=False)
    created_at = models.DateTimeField(default=now, editable=False)
    updated_at = models.DateTimeField(default=now, editable=False)
    version = models.PositiveIntegerField(default=1, editable=False)

    class Meta:
        abstract = True


def advance(queryset: models.QuerySet[Any], **changes: object) -> int:
    """Conditional UPDATE that also raises `version` and `updated_at`; returns the rows changed.

    State machines use it as `advance(Model.objects.filter(pk=…, state__in=…, version=…), state=…)`: a result
    of 0 means that somebody else was faster.
    """
    return queryset.update(version=F("version") + 1, updated_at=now(), **changes)
