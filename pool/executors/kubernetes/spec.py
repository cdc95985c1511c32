"""From a member's rows to the order of its pod."""

from __future__ import annotations

from typing import Any

from pool.executors.base import TerminalFailure
from pool.executors.kubernetes import names
from pool.executors.kubernetes.devices import Asked, devices_for
from pool.executors.kubernetes.manifests import HOLD_COMMAND, PodOrder
from pool.executors.kubernetes.nodes import SeenNode
from pool.executors.kubernetes.options import Options
from pool.executors.variables import request_variables
from pool.models import AllocationMember, Lease

WHOLE = 1000
GRACE_S = 30
MOST_GRACE_S = 3600


def asked_of(member: AllocationMember) -> Asked:
    """What the member's open leases promise."""
    leases = list(
        Lease.objects.filter(allocation_id=member.allocation_id, member=member.number, ended_at=None)
        .select_related("gpu", "mig_slice")
        .order_by("gpu__index", "mig_slice__start", "id")
    )
    slices = tuple(
        (lease.mig_slice.uuid, lease.mig_slice.profile) for lease in leases if lease.mig_slice is not None
    )
    cards = [lease for lease in leases if lease.mig_slice is None]
    parts = [lease for lease in cards if lease.charge < WHOLE]
    return Asked(
        whole=tuple(lease.gpu.uuid for lease in cards if lease.charge >= WHOLE),
        slices=slices,
        fraction_of=tuple(lease.gpu.uuid for lease in parts),
        milli=max((lease.charge for lease in parts), default=0),
        mib=max((lease.memory_mib for lease in parts), default=0),
    )


def order_of(member: AllocationMember, node: SeenNode, options: Options, size: int) -> PodOrder:
    """The order of one of ``size`` members for the node as it is now. `SpecError` or `TerminalFailure` with a code
    for what cannot be run there."""
    allocation = member.allocation
    request = allocation.request
    hold = request.run_kind == request.RunKind.HOLD
    image = request.image if request.run_kind == request.RunKind.IMAGE else options.default_image
    if not image:
        raise TerminalFailure(
            "image_needed", "name a container image: this cluster has none for commands and holds"
        )
    command = HOLD_COMMAND if hold else request.command.strip() and request.command
    if not command and request.run_kind != request.RunKind.IMAGE:
        raise TerminalFailure("nothing_to_run", "the request has no command")
    devices = devices_for(node, asked_of(member))
    person = {str(name): str(value) for name, value in (request.environment or {}).items()}
    checkpoint: dict[str, Any] = request.checkpoint or {}
    return PodOrder(
        uid=allocation.uid,
        number=member.number,
        size=size,
        node=node.name,
        namespace=names.namespace_of(allocation.department.code, options.namespace_prefix),
        image=names.image_checked(image, options.registries),
        command=names.command_checked(command or ""),
        devices=devices,
        env=names.variables_checked(person),
        ours=request_variables(request),
        cpu_milli=member.cpu_milli,
        memory_mib=member.memory_mib,
        grace_s=_grace(checkpoint.get("seconds")),
        signal=str(checkpoint.get("signal") or "SIGTERM"),
        department=allocation.department.code,
        holder=allocation.holder.username,
        reference=request.ref,
        options=options,
    )


def _grace(asked: object) -> int:
    return max(1, min(MOST_GRACE_S, int(asked))) if isinstance(asked, int | float) else GRACE_S
