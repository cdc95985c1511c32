"""What an agent is told to run for one member: the `spec` of the agent protocol's `start`."""

from __future__ import annotations

from typing import Any

from pool.executors.base import TerminalFailure
from pool.executors.variables import request_variables
from pool.models import AllocationMember, Lease
from pool.services.uploads import upload_of
from quotas.models import CapacityRequest

FIRST_PORT, PORTS = 20000, 20000
WHOLE = 1000


def start_spec(member: AllocationMember) -> dict[str, Any]:
    """The spec of a member, from its request, its leases and its gang. Devices in PCI order.

    Raises `TerminalFailure` for what a plain node cannot run (`image_not_supported`, `nothing_to_run`).
    """
    allocation = member.allocation
    request = allocation.request
    image = request.run_kind == request.RunKind.IMAGE
    lacks = (member.node.facts.get("can") or {}).get("containers") or {}
    if image and not lacks.get("ok"):
        why = lacks.get("reason") or "unknown"
        raise TerminalFailure("image_not_supported", f"{member.node.name} runs no container images: {why}")
    hold = request.run_kind == request.RunKind.HOLD
    if not hold and not image and not request.command.strip():
        raise TerminalFailure("nothing_to_run", "the request has no command")
    leases = list(
        Lease.objects.filter(allocation=allocation, member=member.number, ended_at=None)
        .select_related("gpu", "mig_slice")
        .order_by("gpu__pci_bus_id", "gpu__index", "mig_slice__start", "id")
    )
    gpu_uuids = list(dict.fromkeys(lease.gpu.uuid for lease in leases))
    mig_uuids = [lease.mig_slice.uuid for lease in leases if lease.mig_slice is not None]
    fraction = next((lease for lease in leases if lease.mig_slice is None and lease.charge < WHOLE), None)
    return {
        "command": "" if hold else request.command,
        "hold": hold,
        "image": request.image if image else "",
        "env": {
            **{str(name): str(value) for name, value in (request.environment or {}).items()},
            **request_variables(request),
        },
        "health": request.health or None,
        "gpu_uuids": gpu_uuids,
        "mig_uuids": mig_uuids,
        "charge_milli": fraction.charge if fraction else sum(lease.charge for lease in leases),
        "gpu_mem_limit_mib": fraction.memory_mib or None if fraction else None,
        "left": member.node.cluster.settings.get("hold_left") or "name",
        "work_limit_mib": int(member.node.cluster.settings.get("work_limit_mib") or 0),
        "over_share": member.node.cluster.settings.get("over_share") or "notice",
        "mem_limit_mib": member.memory_mib or None,
        "cpu_milli": member.cpu_milli or None,
        "user": allocation.holder.username,
        "system_account": allocation.holder.node_account,
        # The request's, not the allocation's: work that comes back in line finds its checkpoint again.
        "workdir_name": f"{request.ref}-{request.uid.hex[-8:]}",
        "wall_seconds": None,  # the lease's end can move, so the installation stops it, not the node
        "rendezvous": _rendezvous(member, len(mig_uuids) or len(gpu_uuids)),
        "checkpoint": _checkpoint(request.checkpoint),
        "upload": _upload(request),
    }


def _upload(request: CapacityRequest) -> dict[str, Any] | None:
    """Where the node gets the folder that the person sent, and how it knows it."""
    found = upload_of(request)
    if found is None:
        return None
    return {"url": f"/agent/upload/{found.uid}/", "sha256": found.sha256, "size": found.size}


def _checkpoint(settings: dict[str, Any]) -> dict[str, Any] | None:
    kept = {name: settings[name] for name in ("signal", "command") if settings.get(name)}
    return kept or None


def _rendezvous(member: AllocationMember, devices: int) -> dict[str, Any] | None:
    """Where a gang meets: on its first member's node, at a port of its own; None for a single member."""
    gang = list(
        AllocationMember.objects.filter(allocation=member.allocation)
        .select_related("node")
        .order_by("number")
    )
    if len(gang) < 2:
        return None
    first = gang[0].node
    return {
        "master_addr": first.address or first.hostname or first.name,
        "master_port": FIRST_PORT + member.allocation_id % PORTS,
        "node_rank": [item.number for item in gang].index(member.number),
        "nnodes": len(gang),
        "nproc": max(1, devices),
    }
