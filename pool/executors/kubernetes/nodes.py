"""What a node object says of a GPU server: its cards, how they are shared, and whether it takes work now.

Pure. Sources, best first: DRA ``ResourceSlice`` devices and HAMi's register annotation name cards by UUID; the device
plugin only counts, so its cards get made-up UUIDs (``K8S-<node uid>-<index>``) that stay the same. Labels are GPU
Feature Discovery's and the GPU Operator's. What the labels count (`gpu.count`, `gpu.replicas`) does not follow MIG:
allocatable resources are the only count of what can be given out, and a resource that went away stays in capacity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pool.engine.mig import Geometry, geometry_for_product
from pool.executors.kubernetes.names import CORDONED

GPU = "nvidia.com/gpu"
GPU_SHARED = "nvidia.com/gpu.shared"
GPU_MEMORY = "nvidia.com/gpumem"
MIG_PREFIX = "nvidia.com/mig-"
MIG_STATE = "nvidia.com/mig.config.state"
MIG_CONFIG = "nvidia.com/mig.config"
DRIVER_UPGRADE = "nvidia.com/gpu-driver-upgrade-state"
DEPLOY = "nvidia.com/gpu.deploy."
PAUSED = "paused-for-driver-upgrade"
"""What the operator writes on its parts of a node (``gpu.deploy.device-plugin``) while it changes the driver."""
CUTS_CARDS = re.compile(r"all-(?:\d+g\.\d+gb.*|balanced)")
"""MIG Manager's own configurations after which there must be instances."""
HAMI_REGISTER = "hami.io/node-nvidia-register"
DRA_DRIVER = "gpu.nvidia.com"
TOLERATED = frozenset({GPU, CORDONED})
"""Taints that our pods tolerate (the usual one of GPU nodes), or that are our own word and told elsewhere."""
LOST = frozenset({"gpu.nvidia.com/gpu-lost"})
KEPT_LABELS = re.compile(
    r"(?:nvidia\.com/|topology\.kubernetes\.io/|kubernetes\.io/(?:hostname|arch)$|gpupool\.io/)"
)

_QUANTITY = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_SCALE = {"": 1.0, "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_SCALE |= {f"{unit}i": float(1024**power) for power, unit in enumerate("KMGTPE", start=1)}
_KEEP_DASH = re.compile(r"([A-Z]+[0-9]+)-(SXM[0-9]|PCIE)(?:-([0-9]+GB))?")


@dataclass(frozen=True)
class Slice:
    """A MIG instance: where it lies on its card in memory slots. ``uuid`` may be made up."""

    uuid: str
    profile: str
    start: int
    size: int
    memory_mib: int


@dataclass(frozen=True)
class Card:
    """A physical card."""

    uuid: str
    index: int
    name: str
    memory_mib: int
    slices: tuple[Slice, ...] = ()
    mig: bool = False


@dataclass(frozen=True)
class SeenNode:
    """A node as it is now. ``cards`` None: not known at present. ``notes``: findings (code, detail) for people.
    ``cordoned``: the reason that this pool wrote when it closed the node; None where it did not.
    """

    name: str
    uid: str
    ready: bool
    reason: str
    cards: tuple[Card, ...] | None
    allocatable: dict[str, int] = field(default_factory=dict)
    sharing: str = "none"
    replicas: int = 1
    hami: bool = False
    dra: bool = False
    mig_strategy: str = ""
    mig_config: str = ""
    mig_state: str = ""
    missing: int = 0
    cordoned: str | None = None
    driver: str = ""
    cuda: str = ""
    cpu_milli: int = 0
    memory_mib: int = 0
    address: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def open(self) -> bool:
        """Whether new work may go there: nothing speaks against it."""
        return not self.reason


def quantity(text: object) -> float:
    """A resource quantity as a number (``250m`` 0.25, ``1Gi`` 1073741824). ValueError for what is none."""
    found = _QUANTITY.fullmatch(str(text).strip())
    if found is None:
        raise ValueError(f"no quantity: {text!r}")
    return float(found[1]) * _SCALE[found[2] or ""]


def product_name(label: str) -> str:
    """A GFD product label as the driver prints it: ``NVIDIA-H100-80GB-HBM3`` is ``NVIDIA H100 80GB HBM3``, and
    ``NVIDIA-A100-SXM4-80GB`` is ``NVIDIA A100-SXM4-80GB``."""
    plain = re.sub(r"-(?:MIG-.*|SHARED)$", "", re.sub(r"-SHARED$", "", label))
    kept = _KEEP_DASH.sub(lambda m: "\0".join(part for part in m.groups() if part), plain)
    return kept.replace("-", " ").replace("\0", "-")


def profile_of(resource: str) -> str:
    """``nvidia.com/mig-1g.10gb.me`` is the profile ``1g.10gb+me``; empty for another resource."""
    if not resource.startswith(MIG_PREFIX):
        return ""
    return re.sub(r"\.(me(?:\.all)?)$", r"+\1", resource.removeprefix(MIG_PREFIX))


def mig_resource(profile: str) -> str:
    """The resource of a profile under the mixed strategy."""
    return MIG_PREFIX + profile.replace("+", ".")


def read_node(
    node: Mapping[str, Any],
    devices: Iterable[Mapping[str, Any]] = (),
    tolerations: Iterable[str] = (),
) -> SeenNode:
    """Read a node object, with the DRA slices (``ResourceSlice`` objects) of that node where the cluster has them.

    ``tolerations``: keys of taints that our pods tolerate on this cluster besides the usual one of GPU nodes.
    """
    meta, status, spec = node["metadata"], node.get("status") or {}, node.get("spec") or {}
    labels: dict[str, str] = dict(meta.get("labels") or {})
    annotations: dict[str, str] = dict(meta.get("annotations") or {})
    capacity, allocatable = _resources(status.get("capacity")), _resources(status.get("allocatable"))
    uid = str(meta.get("uid") or meta["name"])
    notes: list[tuple[str, str]] = []
    hami = HAMI_REGISTER in annotations
    own = [one for one in devices if (one.get("spec") or {}).get("nodeName") == meta["name"]]
    own = [one for one in own if one["spec"].get("driver") == DRA_DRIVER]
    upgrading = _upgrading(labels)
    changing = upgrading or labels.get(MIG_STATE, "success") not in ("success", "")
    missing = max(0, capacity.get(GPU, 0) - allocatable.get(GPU, 0)) if not hami and not changing else 0
    cards: tuple[Card, ...] | None
    if own:
        cards = _dra_cards(own, notes)
    elif hami:
        cards = _hami_cards(annotations[HAMI_REGISTER], notes)
    elif changing:
        cards = None
    else:
        cards = _counted_cards(uid, labels, capacity, allocatable, notes)
    ready = any(
        one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions") or []
    )
    config = labels.get(MIG_CONFIG, "")
    if not changing and CUTS_CARDS.fullmatch(config) and cards and not any(card.mig for card in cards):
        notes.append(("mig_not_there", f"MIG Manager says {config} is done, and no instance is offered"))
    if (
        own and config
    ):  # two programs that cut the same cards: the DRA driver then offers none, or changes under us
        notes.append(
            ("mig_managed_twice", f"the DRA driver offers these cards, and MIG Manager has {config}")
        )
    if missing:
        notes.append(("gpu_unhealthy", f"{missing} of {capacity[GPU]} {GPU} are not allocatable"))
    return SeenNode(
        name=str(meta["name"]),
        uid=uid,
        ready=ready,
        reason=_reason(ready, spec, labels, notes, TOLERATED.union(tolerations)),
        cards=cards,
        allocatable={name: count for name, count in allocatable.items() if name.startswith("nvidia.com/")},
        sharing=labels.get("nvidia.com/gpu.sharing-strategy") or "none",
        replicas=max(1, _int(labels.get("nvidia.com/gpu.replicas"), 1)),
        hami=hami,
        dra=bool(own),
        mig_strategy=labels.get("nvidia.com/mig.strategy", ""),
        mig_config=labels.get(MIG_CONFIG, ""),
        mig_state=labels.get(MIG_STATE, ""),
        missing=missing,
        cordoned=_cordoned(spec, annotations),
        driver=_driver(labels, own),
        cuda=_cuda(labels),
        cpu_milli=round(quantity((status.get("allocatable") or {}).get("cpu", 0)) * 1000),
        memory_mib=int(quantity((status.get("allocatable") or {}).get("memory", 0)) // 2**20),
        address=next(
            (str(one["address"]) for one in status.get("addresses") or [] if one["type"] == "InternalIP"), ""
        ),
        labels={name: value for name, value in labels.items() if KEPT_LABELS.match(name)},
        notes=tuple(notes),
    )


def _upgrading(labels: Mapping[str, str]) -> bool:
    """Whether the operator changes the node's driver: its plugin is away, so of the cards nothing is known."""
    state = labels.get(DRIVER_UPGRADE, "")
    parts = [value for name, value in labels.items() if name.startswith(DEPLOY)]
    return PAUSED in parts or (state.endswith("-required") and state != "upgrade-required")


def _cordoned(spec: Mapping[str, Any], annotations: Mapping[str, str]) -> str | None:
    if any(taint.get("key") == CORDONED for taint in spec.get("taints") or []):
        return annotations.get(CORDONED, "")
    return None


def _resources(found: Mapping[str, Any] | None) -> dict[str, int]:
    return {name: int(quantity(value)) for name, value in (found or {}).items()}


def _int(text: object, default: int = 0) -> int:
    return int(str(text)) if str(text or "").isdecimal() else default


def _driver(labels: Mapping[str, str], slices: list[Mapping[str, Any]]) -> str:
    full = labels.get("nvidia.com/cuda.driver-version.full") or ".".join(
        part
        for part in (labels.get(f"nvidia.com/cuda.driver.{name}", "") for name in ("major", "minor", "rev"))
        if part
    )
    if full or not slices:
        return full
    for one in slices[0]["spec"].get("devices") or []:
        return str(_attribute(one, "driverVersion"))
    return ""


def _cuda(labels: Mapping[str, str]) -> str:
    full = labels.get("nvidia.com/cuda.runtime-version.full")
    parts = [labels.get(f"nvidia.com/cuda.runtime.{name}", "") for name in ("major", "minor")]
    return full or ".".join(part for part in parts if part)


def _reason(
    ready: bool,
    spec: Mapping[str, Any],
    labels: Mapping[str, str],
    notes: list[tuple[str, str]],
    tolerated: frozenset[str],
) -> str:
    """Why no new work may go there, the strongest first; empty where nothing speaks against it."""
    if not ready:
        return "node_not_ready"
    if spec.get("unschedulable") and not _upgrading(labels):  # the operator itself closes it for that
        return "cordoned_there"
    for taint in spec.get("taints") or []:
        if taint.get("effect") in ("NoSchedule", "NoExecute") and taint.get("key") not in tolerated:
            return f"taint:{taint.get('key')}"
    if _upgrading(labels):
        return "driver_upgrade"
    if labels.get(MIG_STATE, "success") not in ("success", ""):
        return f"mig_{labels[MIG_STATE]}"
    codes = {code for code, _ in notes}
    for code in ("mig_invalid", "gpu_operator_not_ready"):
        if code in codes:
            return code
    return ""


# -- cards that are only counted -----------------------------------------------------------------------------


def _counted_cards(
    uid: str,
    labels: Mapping[str, str],
    capacity: Mapping[str, int],
    allocatable: Mapping[str, int],
    notes: list[tuple[str, str]],
) -> tuple[Card, ...] | None:
    label = labels.get("nvidia.com/gpu.product", "")
    if label.endswith("MIG-INVALID"):
        notes.append(("mig_invalid", "the cards are cut in a way that the device plugin's strategy refuses"))
        return None
    slices = {profile_of(name): count for name, count in allocatable.items() if profile_of(name) and count}
    whole = capacity.get(GPU, 0)
    present = labels.get("nvidia.com/gpu.present") == "true" or (
        labels.get("feature.node.kubernetes.io/pci-10de.present") == "true"
    )
    if not label and not whole and not slices:
        if present:
            notes.append(("gpu_operator_not_ready", "there is an NVIDIA device, and no plugin offers it yet"))
            return None
        return ()
    name, memory = product_name(label), _int(labels.get("nvidia.com/gpu.memory"))
    table = geometry_for_product(name)
    single = re.search(r"-MIG-(\d+g\.\d+gb(?:\.me)?)", label)
    if single is not None:
        return _cut_alike(uid, name, memory, single[1].replace(".me", "+me"), whole, table, notes)
    if (labels.get("nvidia.com/gpu.sharing-strategy") or "none") != "none":
        replicas = max(1, _int(labels.get("nvidia.com/gpu.replicas"), 1))
        shared = whole or capacity.get(GPU_SHARED, 0)
        return _plain(uid, name, memory, _int(labels.get("nvidia.com/gpu.count")) or shared // replicas)
    if not slices:
        return _plain(uid, name, memory, whole)
    count = max(_int(labels.get("nvidia.com/gpu.count")), whole + 1)
    cut = _packed(slices, count - whole, table)
    if table is None or cut is None:
        notes.append(
            ("mig_layout_unknown", f"{slices} do not fit on {count - whole} cards as they are known")
        )
        return None
    cards = [*_plain(uid, name, memory, whole)]
    for offset, profiles in enumerate(cut):
        cards.append(_cut(uid, whole + offset, name, memory, profiles, table))
    return tuple(cards)


def _plain(uid: str, name: str, memory: int, count: int) -> tuple[Card, ...]:
    return tuple(Card(f"K8S-{uid}-{index}", index, name, memory) for index in range(count))


def _cut(uid: str, index: int, name: str, memory: int, profiles: list[str], table: Geometry) -> Card:
    placed = table.layout(profiles) or ()
    sizes = {profile.name: profile.memory_mib or 0 for profile in table.profiles}
    return Card(
        f"K8S-{uid}-{index}",
        index,
        name,
        memory,
        tuple(
            Slice(
                f"K8S-MIG-{uid}-{index}-{one.start}-{one.profile}",
                one.profile,
                one.start,
                one.size,
                sizes[one.profile],
            )
            for one in placed
        ),
        mig=True,
    )


def _cut_alike(
    uid: str,
    name: str,
    memory: int,
    profile: str,
    count: int,
    table: Geometry | None,
    notes: list[tuple[str, str]],
) -> tuple[Card, ...] | None:
    """The single strategy: all cards are cut into the same profile, and `nvidia.com/gpu` counts the instances."""
    each = 0
    while table is not None and table.layout([profile] * (each + 1)) is not None:
        each += 1
    if table is None or not each or not count:
        notes.append(("mig_layout_unknown", f"{count} instances of {profile} on cards that are not known"))
        return None
    # The memory label is an instance's here; the card's own is what its table is called by.
    whole = _int(re.sub(r".*?(\d+)GB$", r"\1", table.key)) * 1024 or memory
    cards = []
    for index in range(-(-count // each)):
        here = min(each, count - index * each)
        cards.append(_cut(uid, index, name, whole, [profile] * here, table))
    return tuple(cards)


def _packed(slices: Mapping[str, int], cards: int, table: Geometry | None) -> list[list[str]] | None:
    """Which instances lie on which of the cut cards: alike on each where the counts allow it, else the largest first
    on the first card that takes it. None where they do not fit."""
    if table is None or cards < 1:
        return None
    if all(count % cards == 0 for count in slices.values()):
        alike = [name for name, count in sorted(slices.items()) for _ in range(count // cards)]
        if table.layout(alike) is not None:
            return [list(alike) for _ in range(cards)]
    sizes = {profile.name: profile.size for profile in table.profiles}
    if any(name not in sizes for name in slices):
        return None
    todo = [name for name, count in slices.items() for _ in range(count)]
    todo.sort(key=lambda name: (-sizes[name], name))
    out: list[list[str]] = [[] for _ in range(cards)]
    for name in todo:
        here = next((one for one in out if table.layout([*one, name]) is not None), None)
        if here is None:
            return None
        here.append(name)
    return out


# -- cards that are named ------------------------------------------------------------------------------------


def _hami_cards(text: str, notes: list[tuple[str, str]]) -> tuple[Card, ...] | None:
    """HAMi's register: seven or nine fields a card joined by `:`, or a JSON list. Unhealthy cards are left out."""
    rows: list[dict[str, Any]] = []
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except ValueError:
            rows = []
    else:
        for part in filter(None, text.split(":")):
            fields = part.split(",")
            if len(fields) >= 7:
                keys = ("id", "count", "devmem", "devcore", "type", "numa", "health", "index", "mode")
                rows.append(dict(zip(keys, fields, strict=False)))
    cards = []
    for position, row in enumerate(rows):
        name = re.sub(r"^NVIDIA-(?=NVIDIA )", "", str(row.get("type") or ""))
        if str(row.get("health", "")).lower() != "true":
            notes.append(("gpu_unhealthy", str(row.get("id"))))
            continue
        cards.append(Card(str(row["id"]), _int(row.get("index"), position), name, _int(row.get("devmem"))))
    if not rows:
        notes.append(("hami_register_unreadable", text[:80]))
        return None
    return tuple(cards)


def _attribute(device: Mapping[str, Any], name: str) -> Any:
    inner = device.get("basic") or device
    value = (inner.get("attributes") or {}).get(name) or {}
    return next(iter(value.values()), "") if isinstance(value, Mapping) else ""


def _dra_cards(slices: list[Mapping[str, Any]], notes: list[tuple[str, str]]) -> tuple[Card, ...]:
    """Devices of ``ResourceSlice`` objects (v1, and v1beta1 with its ``basic``): cards and the instances on them.

    Only the newest generation of a pool counts: older ones are being replaced.
    """
    newest = max(_int((one["spec"].get("pool") or {}).get("generation")) for one in slices)
    devices = [
        device
        for one in slices
        if _int((one["spec"].get("pool") or {}).get("generation")) == newest
        for device in one["spec"].get("devices") or []
    ]
    lost: set[str] = set()
    cards: list[tuple[int, dict[str, Any]]] = []
    parts: dict[str, Any] = {}
    for device in devices:
        taints = {str(taint.get("key")) for taint in (device.get("basic") or device).get("taints") or []}
        if taints:
            notes.append(("gpu_tainted", f"{device['name']}: {', '.join(sorted(taints))}"))
        if taints & LOST:
            lost.add(device["name"])
        kind = _attribute(device, "type")
        if kind == "gpu" and device["name"] not in lost:
            cards.append((_name_index(device["name"]), device))
        elif kind == "mig" and device["name"] not in lost:
            parts.setdefault(str(_attribute(device, "parentUUID")), []).append(device)
    named = {str(_attribute(device, "uuid")) for _, device in cards}
    out = [
        _dra_card(index, device, parts.get(str(_attribute(device, "uuid")), [])) for index, device in cards
    ]
    for parent, items in sorted(parts.items()):
        if parent not in named:  # a card in MIG mode is not offered whole: its instances name it
            index = _name_index(str(items[0]["name"]))
            out.append(_dra_card(index, {**items[0], "_uuid": parent}, items))
    return tuple(sorted(out, key=lambda card: card.index))


def _name_index(name: str) -> int:
    found = re.match(r"gpu-(\d+)", name)
    return int(found[1]) if found else 0


def _dra_card(index: int, device: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> Card:
    made_from_part = "_uuid" in device
    name = str(_attribute(device, "productName"))
    table = geometry_for_product(name)
    memory = _dra_memory(device)
    if made_from_part:
        memory = _int(re.sub(r".*?(\d+)GB$", r"\1", table.key)) * 1024 if table is not None else 0
    return Card(
        str(device.get("_uuid") or _attribute(device, "uuid")),
        index,
        name,
        memory,
        tuple(sorted((_dra_slice(one) for one in parts), key=lambda one: one.start)),
        mig=bool(parts),
    )


def _dra_memory(device: Mapping[str, Any]) -> int:
    inner = device.get("basic") or device
    value = (inner.get("capacity") or {}).get("memory") or 0
    return int(quantity(value["value"] if isinstance(value, Mapping) else value) // 2**20)


def _dra_slice(device: Mapping[str, Any]) -> Slice:
    inner = device.get("basic") or device
    slots = sorted(
        int(name.removeprefix("memorySlice"))
        for name in inner.get("capacity") or {}
        if re.fullmatch(r"memorySlice\d+", name)
    )
    return Slice(
        uuid=str(_attribute(device, "uuid")),
        profile=str(_attribute(device, "profile")),
        start=slots[0] if slots else 0,
        size=max(1, len(slots)),
        memory_mib=_dra_memory(device),
    )
