"""Use that begins, told by the pool for many leases at once."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from portal.kernel.bulk import values_copy
from quotas.models import UsageSpan


class Use(NamedTuple):
    """One lease's holding of a card, from ``started_at`` on; ``key`` is the lease's uid."""

    key: UUID
    request_id: int
    department_id: int
    user_id: int
    flavour_id: int
    site_code: str
    node_name: str
    gpu_label: str
    gpu_uid: UUID
    charge_milli: int
    started_at: datetime


def usage_begin(uses: Iterable[Use]) -> int:
    """Open the spans of new leases in the books; returns how many. IntegrityError for a key that is there already.

    Inside the transaction that writes the leases.
    """
    return values_copy(UsageSpan, (*Use._fields, "accrued_to"), ((*one, one.started_at) for one in uses))
