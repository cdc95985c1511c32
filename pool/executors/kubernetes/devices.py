"""Which resources of a node give a member the devices that its leases promise.

Pure. A device plugin is asked for a number and picks the cards itself; HAMi is told the cards by annotation, DRA by a
claim that names their UUIDs. What a node does not offer is refused with a code instead of left waiting there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pool.executors.kubernetes.names import SpecError
from pool.executors.kubernetes.nodes import GPU, GPU_MEMORY, GPU_SHARED, SeenNode, mig_resource

HAMI_SCHEDULER = "hami-scheduler"
HAMI_CORES = "nvidia.com/gpucores"
HAMI_MEMORY_SHARE = "nvidia.com/gpumem-percentage"
HAMI_CARDS = "nvidia.com/use-gpuuuid"
MADE_UP = "K8S-"
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,100}")


@dataclass(frozen=True)
class Asked:
    """What the leases of a member say: whole cards by UUID, instances as (UUID, profile), or a fraction of each of
    some cards (UUIDs, milli-GPU, MiB; 0 MiB: in proportion)."""

    whole: tuple[str, ...] = ()
    slices: tuple[tuple[str, str], ...] = ()
    fraction_of: tuple[str, ...] = ()
    milli: int = 0
    mib: int = 0

    @property
    def count(self) -> int:
        """Devices in all."""
        return len(self.whole) + len(self.slices) + len(self.fraction_of)


@dataclass(frozen=True)
class Devices:
    """What a pod must carry to get them. ``claims``: device requests of a DRA claim, [(class, UUID)]."""

    resources: dict[str, int] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    scheduler: str = ""
    claims: tuple[tuple[str, str], ...] = ()
    count: int = 0


def devices_for(node: SeenNode, asked: Asked) -> Devices:
    """The resources on this node; `SpecError` with a code where it cannot give them."""
    if not asked.count:
        return Devices()
    if node.dra:
        return _claimed(asked)
    if asked.slices:
        return _instances(node, asked.slices)
    if asked.fraction_of:
        return _fractions(node, asked)
    if node.hami:
        return _hami(node, asked.whole, {HAMI_MEMORY_SHARE: 100, HAMI_CORES: 100})
    if node.sharing != "none":
        raise SpecError(
            "whole_cards_not_offered",
            f"{node.name} gives its cards out in {node.replicas} shares ({node.sharing})",
        )
    _offered(node, GPU, len(asked.whole))
    return Devices({GPU: len(asked.whole)}, count=len(asked.whole))


def _offered(node: SeenNode, resource: str, count: int) -> None:
    there = node.allocatable.get(resource, 0)
    if there < count:
        raise SpecError("resource_not_offered", f"{node.name} offers {there} {resource}, {count} are needed")


def _claimed(asked: Asked) -> Devices:
    if asked.fraction_of:
        raise SpecError("fraction_not_offered", "claims give whole cards and MIG instances")
    claims = [("gpu.nvidia.com", uuid) for uuid in asked.whole]
    claims += [("mig.nvidia.com", uuid) for uuid, _ in asked.slices]
    for _, uuid in claims:
        if not _UUID.fullmatch(uuid):
            raise SpecError("device_unknown", f"no UUID that a claim can name: {uuid[:80]!r}")
    return Devices(claims=tuple(claims), count=len(claims))


def _instances(node: SeenNode, slices: Sequence[tuple[str, str]]) -> Devices:
    if node.hami:
        raise SpecError("mig_not_offered", f"{node.name} is driven by HAMi, which cuts its cards itself")
    if node.mig_strategy == "single":
        wanted = Counter({GPU: len(slices)})
    else:
        wanted = Counter(mig_resource(profile) for _, profile in slices)
    for resource, count in wanted.items():
        _offered(node, resource, count)
    return Devices(dict(sorted(wanted.items())), count=len(slices))


def _fractions(node: SeenNode, asked: Asked) -> Devices:
    memory = min((card.memory_mib for card in node.cards or ()), default=0)
    count = len(asked.fraction_of)
    mib = asked.mib or memory * asked.milli // 1000
    if node.hami:
        if mib > memory:
            raise SpecError("fraction_too_large", f"{mib} MiB of cards with {memory} MiB")
        cores = -(-asked.milli // 10)
        return _hami(node, asked.fraction_of, {GPU_MEMORY: mib, HAMI_CORES: cores})
    if node.sharing == "none":
        raise SpecError("fraction_not_offered", f"{node.name} shares no cards (no HAMi, MPS or time-slicing)")
    if asked.milli * node.replicas > 1000 or mib * node.replicas > memory:
        raise SpecError(
            "fraction_too_large",
            f"a share there is 1/{node.replicas} of a card; {asked.milli} milli-GPU and {mib} MiB were asked",
        )
    resource = GPU_SHARED if node.allocatable.get(GPU_SHARED) else GPU
    _offered(node, resource, count)
    return Devices({resource: count}, count=count)


def _hami(node: SeenNode, uuids: Sequence[str], more: dict[str, int]) -> Devices:
    _offered(node, GPU, len(uuids))
    for uuid in uuids:
        if not _UUID.fullmatch(uuid):
            raise SpecError("device_unknown", f"no UUID that HAMi can be told: {uuid[:80]!r}")
    return Devices(
        {GPU: len(uuids), **more}, {HAMI_CARDS: ",".join(uuids)}, scheduler=HAMI_SCHEDULER, count=len(uuids)
    )


def claim_body(devices: Devices, version: str) -> dict[str, Any]:
    """The `spec` of a ResourceClaim in this version of ``resource.k8s.io`` (`v1`, `v1beta2`, `v1beta1`)."""
    requests = []
    for position, (device_class, uuid) in enumerate(devices.claims):
        wish = {
            "deviceClassName": device_class,
            "allocationMode": "ExactCount",
            "count": 1,
            "selectors": [
                {"cel": {"expression": f"device.attributes['gpu.nvidia.com'].uuid == '{uuid}'"}},
            ],
        }
        name = {"name": f"gpu-{position}"}
        requests.append({**name, **wish} if version == "v1beta1" else {**name, "exactly": wish})
    return {"devices": {"requests": requests}}
