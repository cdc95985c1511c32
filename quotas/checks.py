"""Checks that run before migrations and on request: the settings must fit the books that exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.core.checks import Error, Tags, register
from django.db import DatabaseError, connections, transaction


@register(Tags.database)
def one_currency(databases: Sequence[str] | None = None, **_more: Any) -> list[Error]:
    """The ledger has one currency: sums of two would mean nothing. Before the first line any will do."""
    for alias in databases or ():
        connection = connections[alias]
        try:
            with transaction.atomic(using=alias), connection.cursor() as cursor:
                cursor.execute("SELECT currency FROM quotas_ledgerentry ORDER BY id DESC LIMIT 1")
                row = cursor.fetchone()
        except DatabaseError:
            continue  # not migrated yet
        if row is not None and row[0] != settings.GPUPOOL_CURRENCY:
            return [
                Error(
                    f"The ledger is kept in {row[0]}, GPUPOOL_CURRENCY says {settings.GPUPOOL_CURRENCY}.",
                    hint=f"Set GPUPOOL_CURRENCY={row[0]}. Another currency begins with a ledger of its own: "
                    "a new installation, with the old one kept for reading.",
                    id="quotas.E001",
                )
            ]
    return []
