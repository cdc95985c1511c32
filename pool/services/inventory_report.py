"""What an agent reports of its cards becomes inventory. A card is its UUID; its index only says where it is
now.

New cards are added (or take the place of imported ones), cards that moved follow, vanished ones keep their
row and their leases are flagged, returned ones are healthy again. A UUID that a living node reports already
is refused and opens an incident. When NVML itself is broken nothing is concluded about the cards.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from pool.models import AllocationEvent, Gpu, Lease, MigSlice, Node
from pool.services.capacity import capacity_refresh
from pool.services.conditions import gpu_condition_set
from portal.kernel.clock import now
from portal.kernel.models import advance
from portal.ops.actor import system
from portal.ops.models import Incident
from portal.ops.services.audit import audit_record
from portal.ops.services.incidents import incident_open
from quotas.models import GpuFlavour
from quotas.services.flavours import flavour_ensure

IMPORTED = "IMPORT-"
FRESH = timedelta(seconds=60)
AGENT = system("agent", via="agent")
VANISHED_REASON = "gpu_lost"
UNCONFIRMED = "not_confirmed"


def inventory_sync(*, node: Node, gpus: list[dict[str, Any]], nvml_ok: bool) -> bool:
    """Bring the node's cards in line with a report (inside the caller's transaction, node locked).

    Returns whether capacity changed. With `nvml_ok` false an empty list means "not known", not "no cards".
    """
    rows = Gpu.objects.select_for_update(no_key=True).filter(node=node).order_by("id")
    known = {gpu.uuid: gpu for gpu in rows}
    if not nvml_ok:
        return _unconfirmed(known)
    at = now()
    changed = False
    seen: set[str] = set()
    for report in gpus:
        uuid = str(report.get("uuid") or "")[:80]
        if not uuid or uuid in seen:
            continue
        gpu = known.get(uuid) or _taken_over(node, report, known) or _moved_here(node, uuid)
        if gpu is None and Gpu.objects.filter(uuid=uuid).exists():
            _refuse_foreign(node, uuid)
            continue
        seen.add(uuid)
        if gpu is None:
            gpu = _new(node, uuid, report, at)
            changed = True
        else:
            changed = _update(gpu, node, uuid, report, at) or changed
        changed = _slices_sync(gpu, report.get("mig") or {}, at) or changed
    for uuid, gpu in known.items():
        if gpu.uuid not in seen and uuid not in seen:
            changed = gpu_vanished(gpu=gpu) or changed
    if changed:
        capacity_refresh()
    return changed


def _unconfirmed(known: dict[str, Gpu]) -> bool:
    """Imported cards that no NVML has confirmed yet: nothing may be placed on what perhaps is not there."""
    changed = False
    for gpu in known.values():
        if gpu.uuid.startswith(IMPORTED) and gpu.condition == Gpu.Condition.OK:
            changed = gpu_condition_set(
                acting_user=AGENT, gpu=gpu, condition=Gpu.Condition.SUSPECT, reason=UNCONFIRMED
            )
    return changed


def _fields(report: dict[str, Any]) -> dict[str, Any]:
    """A card's columns from its report; what the agent could not read stays out."""
    values: dict[str, Any] = {
        "index": int(report.get("index") or 0),
        "mig_enabled": bool((report.get("mig") or {}).get("enabled")),
        "nvlink": report.get("nvlink") or {},
        "pcie": report.get("pcie") or {},
    }
    numa = report.get("numa")
    optional = {
        "model_name": str(report.get("name") or "")[:120],
        "serial": str(report.get("serial") or "")[:64],
        "pci_bus_id": str(report.get("pci_bus_id") or "")[:32],
        "memory_mib": report.get("memory_mib"),
        "power_limit_mw": report.get("power_limit_mw"),
        "numa_node": numa if isinstance(numa, int) and 0 <= numa < 2**15 else None,
    }
    return values | {name: value for name, value in optional.items() if value not in (None, "")}


def _flavour(model_name: str, memory_mib: int | None) -> GpuFlavour | None:
    """The flavour of such a card, made from the catalogue when it is the first; none without name and
    memory."""
    if not model_name or not memory_mib:
        return None
    return flavour_ensure(model_name=model_name, memory_mib=memory_mib)


def _new(node: Node, uuid: str, report: dict[str, Any], at: datetime) -> Gpu:
    values = _fields(report)
    values.setdefault("model_name", "")
    gpu = Gpu.objects.create(
        uuid=uuid,
        node=node,
        flavour=_flavour(values["model_name"], values.get("memory_mib")),
        last_seen_at=at,
        simulated=node.simulated,
        **values,
    )
    audit_record(
        acting_user=AGENT,
        action="gpu.found",
        subject=gpu,
        after={"uuid": uuid, "node": node.name, "model": gpu.model_name, "index": gpu.index},
    )
    return gpu


def _taken_over(node: Node, report: dict[str, Any], known: dict[str, Gpu]) -> Gpu | None:
    """The imported card at this index, whose made-up UUID gives way to the real one."""
    index = int(report.get("index") or 0)
    for gpu in known.values():
        if gpu.uuid.startswith(IMPORTED) and gpu.index == index:
            return gpu
    return None


def _moved_here(node: Node, uuid: str) -> Gpu | None:
    """The card of another node that may have moved: nobody holds it there, and that node does not report
    it."""
    gpu = (
        Gpu.objects.select_for_update(of=("self",), no_key=True)
        .select_related("node")
        .filter(uuid=uuid)
        .first()
    )
    if gpu is None or gpu.node_id == node.pk:
        return gpu
    other = gpu.node
    beats = other.last_heartbeat_at
    alive = beats is not None and beats > now() - FRESH and other.schedulable != Node.Schedulable.RETIRED
    if (alive and gpu.condition != Gpu.Condition.VANISHED) or gpu.leases.filter(ended_at=None).exists():
        return None
    return gpu


def _refuse_foreign(node: Node, uuid: str) -> None:
    other = Gpu.objects.select_related("node").get(uuid=uuid)
    incident_open(
        kind="gpu_uuid_twice",
        dedupe_key=f"gpu_uuid_twice:{uuid}:{node.pk}",
        severity=Incident.Severity.CRITICAL,
        subject=node,
        facts={"uuid": uuid, "reported_by": node.name, "belongs_to": other.node.name},
    )


def _update(gpu: Gpu, node: Node, uuid: str, report: dict[str, Any], at: datetime) -> bool:
    """Write what differs. Whether capacity changed: the card is new here, is back, or changed its MIG
    mode."""
    before = {"uuid": gpu.uuid, "node": gpu.node.name if gpu.node_id != node.pk else node.name}
    values = {name: value for name, value in _fields(report).items() if getattr(gpu, name) != value}
    moved, renamed = gpu.node_id != node.pk, gpu.uuid != uuid
    values |= {"node": node} if moved else {}
    values |= {"uuid": uuid} if renamed else {}
    if gpu.flavour_id is None or (renamed and gpu.model_name != report.get("name")):
        flavour = _flavour(values.get("model_name", gpu.model_name), values.get("memory_mib", gpu.memory_mib))
        values |= {"flavour": flavour} if flavour is not None else {}
    if values:
        advance(Gpu.objects.filter(pk=gpu.pk), last_seen_at=at, **values)
        gpu.refresh_from_db()
    else:
        Gpu.objects.filter(pk=gpu.pk).update(last_seen_at=at)
    if moved or renamed:
        action = "gpu.moved" if moved else "gpu.identified"
        audit_record(
            acting_user=AGENT,
            action=action,
            subject=gpu,
            before=before,
            after={"uuid": uuid, "node": node.name, "index": gpu.index},
        )
    back = gpu_returned(gpu=gpu)
    return moved or renamed or back or "mig_enabled" in values or "flavour" in values


def gpu_returned(*, gpu: Gpu) -> bool:
    """The card answers. False when it had neither vanished nor waited to be confirmed."""
    waited = gpu.condition == Gpu.Condition.SUSPECT and gpu.condition_reason == UNCONFIRMED
    if gpu.condition != Gpu.Condition.VANISHED and not waited:
        return False
    gpu_condition_set(acting_user=AGENT, gpu=gpu, condition=Gpu.Condition.OK)
    _tell_holders(gpu, "gpu_back")
    return True


def gpu_vanished(*, gpu: Gpu) -> bool:
    """The card is no longer seen: its row stays, its holders are told, an incident opens. False when
    known."""
    if gpu.condition in (Gpu.Condition.VANISHED, Gpu.Condition.RETIRED):
        return False
    leased = Lease.objects.filter(gpu=gpu, ended_at=None).exists()
    gpu_condition_set(
        acting_user=AGENT,
        gpu=gpu,
        condition=Gpu.Condition.VANISHED,
        reason=VANISHED_REASON,
        facts={"uuid": gpu.uuid, "leased": leased},
    )
    _tell_holders(gpu, "gpu_vanished")
    return True


def _tell_holders(gpu: Gpu, kind: str) -> None:
    facts = {"uuid": gpu.uuid, "node": gpu.node.name, "index": gpu.index}
    held = Lease.objects.filter(gpu=gpu, ended_at=None).values_list("allocation_id", flat=True).distinct()
    AllocationEvent.objects.bulk_create(
        AllocationEvent(allocation_id=pk, at=now(), kind=kind, actor_name=AGENT.name, facts=facts)
        for pk in held
    )


def _slices_sync(gpu: Gpu, mig: dict[str, Any], at: datetime) -> bool:
    """MIG instances by UUID: new ones added, gone ones stamped. History stays with (card, instance, time)."""
    reports = {str(item["uuid"]): item for item in mig.get("slices") or [] if item.get("uuid")}
    present = {row.uuid: row for row in MigSlice.objects.filter(gpu=gpu, gone_at=None)}
    gone = [row.pk for uuid, row in present.items() if uuid not in reports]
    if gone:
        advance(MigSlice.objects.filter(pk__in=gone), gone_at=at)
    added = False
    next_start = 0
    for uuid, item in reports.items():
        profile = str(item.get("profile") or "")[:24]
        slots = int(profile[0]) if profile[:1].isdecimal() else 1
        size = item.get("size") or {3: 4, 7: 8}.get(slots, slots)
        start = item.get("start")
        start = next_start if start is None else int(start)
        next_start = start + int(size)
        if uuid in present:
            continue
        added = True
        MigSlice.objects.create(
            gpu=gpu,
            uuid=uuid[:120],
            profile=profile,
            gpu_instance=int(item.get("gi") or 0),
            compute_instance=int(item.get("ci") or 0),
            start=start,
            size=int(size),
            compute_slices=max(1, slots),
            memory_mib=int(item.get("memory_mib") or 0),
        )
    return bool(gone) or added
