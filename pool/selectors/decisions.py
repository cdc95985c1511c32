"""Decisions of the scheduler as people read them: names instead of row numbers, in few queries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.db.models import Q, QuerySet

from pool.models import Allocation, Gpu, Node, SchedulerCycle
from portal.kernel.units import from_ms
from quotas.models import CapacityRequest, GpuFlavour

OPS = ("place", "reserve", "evict", "keep", "move", "layout")


@dataclass(frozen=True, slots=True)
class OpRow:
    """One operation with what it names looked up; ``refusal`` is the code why it was not carried out."""

    number: int
    op: str
    request: CapacityRequest | None
    allocation: Allocation | None
    flavour: str
    facts: dict[str, Any]
    nodes: tuple[tuple[str, int], ...]
    refusal: str


def cycles_listed(*, kind: str = "", cause: str = "", request: str = "") -> QuerySet[SchedulerCycle]:
    """Decisions, newest first: ``kind`` placed, evicted or refused; ``cause`` exactly; ``request`` a number R-17
    that was placed or refused.
    """
    rows = SchedulerCycle.objects.select_related("policy").defer("ops").order_by("-id")
    if kind == "placed":
        rows = rows.filter(placed__gt=0)
    elif kind == "evicted":
        rows = rows.filter(evicted__gt=0)
    elif kind == "refused":
        rows = rows.filter(refused_on_apply__gt=0)
    if cause:
        rows = rows.filter(cause=cause)
    number = request.strip().upper().removeprefix("R-")
    if number.isdecimal():
        named = Q(allocations__request_id=int(number)) | Q(refusals__contains=[{"request": int(number)}])
        rows = rows.filter(named).distinct()
    elif request.strip():
        rows = rows.none()
    return rows


def ops_read(cycle: SchedulerCycle, *, limit: int = 200) -> list[OpRow]:
    """The operations of a decision in their order, at most ``limit``."""
    ops = cycle.ops[:limit]
    requests = _by_id(CapacityRequest.objects.select_related("department", "requester"), ops, "request")
    allocations = _by_id(
        Allocation.objects.select_related("department", "holder", "request"), ops, "allocation"
    )
    nodes = dict(
        Node.objects.filter(
            pk__in={member["node"] for op in ops for member in op.get("members", ())}
        ).values_list("pk", "name")
    )
    cards = dict(
        Gpu.objects.filter(pk__in={op["gpu"] for op in ops if "gpu" in op}).values_list("pk", "node__name")
    )
    names = dict(GpuFlavour.objects.values_list("code", "name"))
    refused = {one["request"]: one["code"] for one in cycle.refusals}
    return [
        OpRow(
            number=number,
            op=op["op"],
            request=requests.get(op.get("request")),
            allocation=allocations.get(op.get("allocation")),
            flavour=names.get(op.get("flavour") or "", op.get("flavour") or ""),
            facts=_facts(op, cards),
            nodes=tuple(
                (nodes.get(member["node"], f"#{member['node']}"), len(member["gpus"]))
                for member in op.get("members", ())
            ),
            refusal=refused.get(op["request"], "") if op["op"] == "place" else "",
        )
        for number, op in enumerate(ops, start=1)
    ]


def _by_id(rows: QuerySet[Any], ops: Iterable[dict[str, Any]], name: str) -> dict[int | None, Any]:
    return dict(rows.in_bulk({op[name] for op in ops if op.get(name) is not None}))


def _facts(op: dict[str, Any], cards: dict[int, str]) -> dict[str, Any]:
    facts = {key: value for key, value in op.items() if key not in {"op", "members", "request", "allocation"}}
    for key in ("ends_at", "at", "until"):
        if isinstance(facts.get(key), int):
            facts[key] = from_ms(facts[key])
    if "gpu" in facts:
        facts["node"] = cards.get(facts["gpu"], "")
    return facts
