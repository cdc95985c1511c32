"""Small builders of pools, requests and quotas for engine tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pool.engine.mig import geometry
from pool.engine.model import FlavourFacts, Gpu, Member, Node, Request, Running, Slice, Snapshot, Take
from quotas.engine.tree import QuotaNode

HOUR = 3_600_000
NOW = 1_000_000 * HOUR

FLAVOURS = (
    FlavourFacts("A100", 40960, nvlink=True, geometry=geometry("A100-40GB")),
    FlavourFacts("H100", 81920, nvlink=True, fp8=True, geometry=geometry("H100-80GB")),
    FlavourFacts("T4", 16384),
)
MEMORY = {facts.code: facts.memory_mib for facts in FLAVOURS}


def node(number: int, count: int = 8, flavour: str = "A100", **changes: Any) -> Node:
    """Node ``n<number>`` with cards ``number * 100 + index``."""
    card = changes.pop("card", {})
    gpus = tuple(Gpu(number * 100 + index, index, flavour, MEMORY[flavour], **card) for index in range(count))
    values: dict[str, Any] = {"cluster_id": 1, "site": "bj", "nvlink": flavour != "T4"} | changes
    return Node(number, f"n{number}", values.pop("cluster_id"), values.pop("site"), gpus, **values)


def split_node(number: int, profiles: Iterable[str], flavour: str = "A100", count: int = 1) -> Node:
    """A node whose cards all carry the same MIG layout; slices are ``card * 10 + position``."""
    table = geometry({"A100": "A100-40GB", "H100": "H100-80GB"}[flavour])
    assert table is not None
    layout = table.layout(list(profiles))
    assert layout is not None
    gpus = []
    for index in range(count):
        card = number * 100 + index
        slices = tuple(
            Slice(
                card * 10 + position,
                one.profile,
                table.span(one.start, one.size),
                table.charge(one.profile),
                4864,
            )
            for position, one in enumerate(layout)
        )
        gpus.append(Gpu(card, index, flavour, MEMORY[flavour], mig=True, slices=slices))
    return Node(number, f"n{number}", 1, "bj", tuple(gpus), nvlink=True)


def ask(number: int, per_node: int = 1, *flavours: str, **changes: Any) -> Request:
    values: dict[str, Any] = {"department_id": 2, "duration_ms": 4 * HOUR, "queued_at": number} | changes
    return Request(number, values.pop("department_id"), flavours or ("A100",), per_node=per_node, **values)


def run(
    number: int,
    node_id: int,
    cards: Iterable[int],
    hours: float | None = 4,
    department: int = 2,
    **changes: Any,
) -> Running:
    """Whole cards (by index) of one node, held until ``hours`` from NOW."""
    takes = tuple(Take(node_id * 100 + index, ((0, 1000),), 1000, 0) for index in cards)
    values: dict[str, Any] = {"flavour": "A100", "cpu_milli": 0, "memory_mib": 0} | changes
    member = Member(0, node_id, values.pop("cpu_milli"), values.pop("memory_mib"), takes)
    ends = None if hours is None else NOW + int(hours * HOUR)
    return Running(
        number, 10_000 + number, department, values.pop("flavour"), 1000 * len(takes), (member,),
        ends_at=ends, **values,
    )  # fmt: skip


def quota(*rows: QuotaNode, flavour: str = "A100") -> dict[str, tuple[QuotaNode, ...]]:
    return {flavour: rows}


def pool(
    nodes: Iterable[Node], pending: Iterable[Request] = (), running: Iterable[Running] = (), **changes: Any
) -> Snapshot:
    return Snapshot(tuple(nodes), FLAVOURS, tuple(running), tuple(pending), **changes)
