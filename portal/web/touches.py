"""What acts on people and departments touch in the rooms above them: counted for the dialogs that ask first,
and carried along by a move within its own transaction. The wiring knows all rooms; people know none of them."""

from __future__ import annotations

from django.db.backends.postgresql.psycopg_any import DateTimeTZRange
from django.db.models import F, Sum
from django.utils.translation import gettext_lazy as _

from pool.models import Allocation
from portal.accounts.effects import Effect
from portal.kernel.clock import now
from portal.ops.actor import Actor
from quotas.models import CapacityRequest, QuotaGrant, QuotaUsage
from quotas.services.grants import grants_end
from quotas.services.usage import usage_recompute

WAITING = ("in_approval", "returned", "needs_consent", "queued", "series")


def of_departments(act: str, department_ids: list[int]) -> list[Effect]:
    """Asks that wait, leases that run, quotas that end; of "reopen" the quotas that do not come back by it."""
    if act == "reopen":
        ended = QuotaGrant.objects.filter(
            department_id__in=department_ids, during__endswith__gte=F("department__closed_at")
        )
        lost = ended.values("flavour_id").distinct().count()
        return [Effect(_("Quotas that ended when it was closed"), lost)]
    held = Allocation.objects.filter(department_id__in=department_ids).exclude(state=Allocation.State.ENDED)
    waiting = CapacityRequest.objects.filter(department_id__in=department_ids, state__in=WAITING)
    found = [Effect(_("Requests that wait"), waiting.count()), Effect(_("Open allocations"), held.count())]
    if act == "close":
        left = DateTimeTZRange(now(), None)
        grants = QuotaGrant.objects.filter(department_id__in=department_ids, during__overlap=left)
        found.append(Effect(_("Quotas that end"), grants.count()))
    return found


def of_people(act: str, user_ids: list[int]) -> list[Effect]:
    """Asks that wait and leases that run of the people."""
    held = Allocation.objects.filter(holder_id__in=user_ids).exclude(state=Allocation.State.ENDED)
    waiting = CapacityRequest.objects.filter(requester_id__in=user_ids, state__in=WAITING)
    return [Effect(_("Requests that wait"), waiting.count()), Effect(_("Open allocations"), held.count())]


def held_by(user_ids: list[int]) -> dict[int, int]:
    """Milli-GPU that each of the people holds now."""
    rows = (
        Allocation.objects.filter(holder_id__in=user_ids)
        .exclude(state=Allocation.State.ENDED)
        .values_list("holder_id")
        .annotate(total=Sum("charge_milli"))
    )
    return {holder: int(total) for holder, total in rows if total}


def use_follows(department_id: int, old_parent_id: int | None, new_parent_id: int | None) -> None:
    """A moved department carries its use from the old levels above to the new ones."""
    flavours = QuotaUsage.objects.order_by("flavour_id").values_list("flavour_id", flat=True).distinct()
    for flavour_id in flavours:
        usage_recompute(flavour_id=flavour_id)


def quota_ends(acting_user: Actor, department_id: int, reason: str) -> None:
    """A closed department has no quota any more: what it kept is there for the others at once."""
    grants_end(acting_user=acting_user, department_id=department_id, reason=reason)
