"""Row locks of this room, always taken in this order: flavour (it stands for the root of its quota tree, the
whole installation), usage rows root to leaf, request, quota change, approval step.
"""

from __future__ import annotations

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from portal.kernel.errors import NotFound
from quotas.models import ApprovalStep, CapacityRequest, GpuFlavour, QuotaChange


def _in_transaction() -> None:
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("row locks need a transaction")


def flavour_lock(flavour_id: int) -> GpuFlavour:
    """Lock one flavour's quota tree against every other debit, release and change of limits."""
    _in_transaction()
    row = GpuFlavour.objects.select_for_update(no_key=True).filter(pk=flavour_id).first()
    if row is None:
        raise NotFound(code="flavour_unknown", detail=_("There is no such GPU flavour."))
    return row


def request_lock(request_id: int) -> CapacityRequest:
    """Lock one request."""
    _in_transaction()
    row = CapacityRequest.objects.select_for_update(no_key=True).filter(pk=request_id).first()
    if row is None:
        raise NotFound(code="request_unknown", detail=_("There is no such request."))
    return row


def quota_change_lock(change_id: int) -> QuotaChange:
    """Lock one quota change."""
    _in_transaction()
    row = QuotaChange.objects.select_for_update(no_key=True).filter(pk=change_id).first()
    if row is None:
        raise NotFound(code="quota_change_unknown", detail=_("There is no such quota change."))
    return row


def step_lock(step_id: int) -> ApprovalStep:
    """Lock one approval step (after the thing that it belongs to)."""
    _in_transaction()
    row = ApprovalStep.objects.select_for_update(no_key=True).filter(pk=step_id).first()
    if row is None:
        raise NotFound(code="step_unknown", detail=_("There is no such approval step."))
    return row
