"""How a node is wired: its GPUs by NUMA half, NVLink between them, PCIe to them, what leaves the node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pool.models import Gpu, Node, NodeFabric, NodeStorage


@dataclass
class Half:
    """The GPUs of one NUMA node; `number` None where the agent did not tell it. `pcie`: each link there is, once."""

    number: int | None
    gpus: list[Gpu] = field(default_factory=list)
    pcie: list[str] = field(default_factory=list)


@dataclass
class Topology:
    """`links`: NVLinks a GPU (fewest, most); `pairs`: for each GPU the word to each other one, in order of index."""

    halves: list[Half]
    links: tuple[int, int]
    short: list[Gpu]
    fabrics: list[NodeFabric]
    storages: list[NodeStorage]
    pairs: list[tuple[Gpu, list[str]]]


def topology_of(node: Node) -> Topology:
    """Three queries. GPUs that are retired are left out."""
    gpus = list(
        Gpu.objects.filter(node=node).exclude(condition=Gpu.Condition.RETIRED).order_by("index", "id")
    )
    halves: dict[int | None, Half] = {}
    for gpu in gpus:
        half = halves.setdefault(gpu.numa_node, Half(gpu.numa_node))
        half.gpus.append(gpu)
        link = pcie_words(gpu.pcie)
        if link and link not in half.pcie:
            half.pcie.append(link)
    counts = [_links(gpu) for gpu in gpus]
    most = max(counts, default=0)
    return Topology(
        halves=[halves[key] for key in sorted(halves, key=lambda k: (k is None, k or 0))],
        links=(min(counts, default=0), most),
        short=[gpu for gpu, n in zip(gpus, counts, strict=True) if most and n < most],
        fabrics=list(NodeFabric.objects.filter(node=node).exclude(kind="nvlink").order_by("kind")),
        storages=list(NodeStorage.objects.filter(node=node).order_by("kind", "path")),
        pairs=[(gpu, [pair_word(gpu, other) for other in gpus]) for gpu in gpus],
    )


def pcie_words(pcie: dict[str, Any] | None) -> str:
    """`PCIe 5.0 ×16`; empty where it is not known."""
    if not pcie or not pcie.get("gen") or not pcie.get("width"):
        return ""
    return f"PCIe {pcie['gen']}.0 ×{pcie['width']}"


def _links(gpu: Gpu) -> int:
    return int((gpu.nvlink or {}).get("links") or 0)


def pair_word(a: Gpu, b: Gpu) -> str:
    """As `nvidia-smi topo -m` says it: NVn by n NVLinks, NODE within a NUMA node, SYS across, ? not told."""
    if a.pk == b.pk:
        return "–"
    if b.uuid in ((a.nvlink or {}).get("peers") or []):
        return f"NV{min(_links(a), _links(b))}"
    if a.numa_node is None or b.numa_node is None:
        return "?"
    return "NODE" if a.numa_node == b.numa_node else "SYS"
