"""Cards that were not free when a node was to hand them over: taken out of placement with the finding; the
work goes elsewhere.

Nothing was started there, so there is nothing to wait for: the member counts as through, and what keeps the
card from being given to the next one is the cordon, not a lease.
"""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import Q

from pool.locks import allocation_lock
from pool.models import AllocationEvent, AllocationMember, Gpu
from pool.services.conditions import gpu_cordon
from portal.kernel.clock import now
from portal.kernel.errors import Conflict
from portal.ops.actor import system
from portal.ops.services import incident_open

NOT_FREE = "gpu_not_free"
EXECUTOR = system("executor", via="agent")
M = AllocationMember.State


def handover_refused(*, member_id: int, gpus: dict[str, dict[str, Any]]) -> bool:
    """``gpus``: what the node found on each card or slice that was not free ({uuid: {reason, procs}}).

    True where the member was set through by this call. Done twice, done once.
    """
    member = AllocationMember.objects.select_related("node", "allocation").get(pk=member_id)
    found = list(
        Gpu.objects.filter(Q(uuid__in=gpus) | Q(mig_slices__uuid__in=gpus), node=member.node)
        .distinct()
        .order_by("pk")
    )
    for gpu in found:
        _cordon(gpu, member, _reason(gpu, gpus))
    if not found:
        # The node named no card that we know: then its look decides, as after every job.
        return False
    with transaction.atomic():
        allocation = allocation_lock(member.allocation_id)
        changed = AllocationMember.objects.filter(pk=member_id, state=M.EXITED, started_at=None).update(
            state=M.FREE, seen_free_at=now()
        )
        if changed:
            AllocationEvent.objects.create(
                allocation=allocation,
                at=now(),
                kind="handover_refused",
                actor_name=EXECUTOR.name,
                facts={"node": member.node.name, "gpus": [str(gpu.uid) for gpu in found]},
            )
    return bool(changed)


def _reason(gpu: Gpu, gpus: dict[str, dict[str, Any]]) -> str:
    item = gpus.get(gpu.uuid) or next(iter(gpus.values()), {})
    return str(item.get("reason") or "unknown")[:64]


def _cordon(gpu: Gpu, member: AllocationMember, reason: str) -> None:
    with transaction.atomic():
        try:
            gpu_cordon(
                acting_user=EXECUTOR, gpu=gpu, cordoned=True, reason=f"not free at hand-over: {reason}"
            )
        except Conflict:
            return
        incident_open(
            kind="gpu_not_free_at_start",
            dedupe_key=f"gpu_not_free_at_start:{gpu.uid}",
            subject=gpu,
            facts={"node": member.node.name, "index": gpu.index, "reason": reason},
        )
