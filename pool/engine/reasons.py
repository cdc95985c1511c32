"""Why a request waits: one stable code with the figures behind it, from the rules it failed first.

Codes, each with its figures:
    not_before            start_at, kept: whether places are kept for it from then on
    user_limit            limit, used, requested
    quota_blocked         level, rule, limit, used, requested, available, flavour
    model_absent          flavours
    memory_too_small, fp8_absent, nvlink_absent, mig_profile_absent   flavour and what was asked
    driver_too_old, cuda_too_old   needed, newest, nodes
    other_site            site, sites
    nodes_unavailable     flavour, nodes, excluded[{because, count, nodes}]
    larger_than_any_node  need_per_node, largest_node, flavour
    too_few_nodes         need_nodes, large_enough, flavour
    no_node_fits          need_per_node, need_nodes, best_free_on_one_node, missing, free, installed,
    nodes[{node,
                          free}], excluded, flavour
    split_over_sites      need_nodes, best_in_one_site, sites: enough nodes, but a gang stays on one site
    no_card_fits          need_milli, need_mib, best_free_milli, best_free_mib, flavour, excluded
    no_slice_free         profile, need, best_free_on_one_node, free, existing, flavour
    host_short            need_cpu_milli, best_cpu_milli, need_memory_mib, best_memory_mib
    waiting_for_release   flavour, need, installed, free: everything of it is in use
    behind                requests, reserved_from: it fits now but would delay them
    closed_soon           closed_from, flavour: it fits now but would still run when nodes are closed
    making_room           charge_milli, evicts, until, flavour: work ends so that it can start

Where a request has a deadline, its reason also says ``deadline_at`` and ``deadline_met``: whether it can still
be met by what is known (None: nothing is known).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pool.engine.fit import Need, flavour_refusal, gpu_refusal, node_refusal
from pool.engine.model import Estimate, FlavourFacts, Policy, Request
from pool.engine.placement import cards_for, count_places, host_fits, nodes_of
from pool.engine.state import NodeState, PoolState, View, room
from quotas.engine.available import Admission


@dataclass(frozen=True, slots=True)
class Reason:
    code: str
    figures: Mapping[str, Any]
    flavour: str | None = None


def quota_blocked(flavour: str, admission: Admission) -> Reason:
    """The reason of an ask that a quota level refuses."""
    figures = {**(admission.as_blocking() or {}), "available": admission.available, "flavour": flavour}
    return Reason("quota_blocked", figures, flavour)


def with_deadline(reason: Reason, request: Request, estimate: Estimate | None, now: int) -> Reason:
    """The reason with what is known of the request's deadline: what would start now at the earliest, or as the
    range says."""
    if request.deadline_at is None:
        return reason
    needed = request.duration_ms or 0
    met: bool | None = None
    if now + needed > request.deadline_at or (
        estimate is not None and estimate.earliest + needed > request.deadline_at
    ):
        met = False
    elif estimate is not None and estimate.latest + needed <= request.deadline_at:
        met = True
    figures = {**reason.figures, "deadline_at": request.deadline_at, "deadline_met": met}
    return Reason(reason.code, figures, reason.flavour)


def flavour_reason(request: Request, facts: Mapping[str, FlavourFacts]) -> Reason:
    """Why none of the acceptable flavours can ever serve the request."""
    for code in request.flavours:
        refusal = flavour_refusal(request, facts.get(code))
        if refusal is not None and refusal != "model_absent":
            figures: dict[str, Any] = {"flavour": code}
            if refusal == "memory_too_small":
                figures |= {
                    "need_mib": request.min_gpu_mib or request.share_mib,
                    "has_mib": facts[code].memory_mib,
                }
            elif refusal == "mig_profile_absent":
                geometry = facts[code].geometry
                offered = [profile.name for profile in geometry.profiles] if geometry else []
                figures |= {"profile": request.profile, "offered": offered}
            return Reason(refusal, figures, code)
    return Reason("model_absent", {"flavours": list(request.flavours)}, next(iter(request.flavours), None))


def place_reason(state: PoolState, request: Request, need: Need, policy: Policy) -> Reason:
    """Why a request finds no place in the pool as it is now, promises to others left aside."""
    everything = View({}, frozenset(), {})
    flavour = need.flavour
    nodes = list(nodes_of(state, flavour))
    if not nodes:
        return Reason("model_absent", {"flavours": list(request.flavours)}, flavour)
    refused: dict[str, list[NodeState]] = {}
    usable: list[NodeState] = []
    for node in nodes:
        refusal = node_refusal(node.node, request)
        if refusal is None:
            usable.append(node)
        else:
            refused.setdefault(refusal, []).append(node)
    excluded = _excluded(refused, policy)
    if not usable:
        return _all_refused(request, nodes, refused, excluded, flavour)
    if request.shape == "cpu":
        return _host_short(usable, request, everything, None)
    size = {node.node.id: _capacity(node, request, need) for node in usable}
    largest = max(size.values())
    if request.shape != "mig" and largest < request.per_node:
        figures = {"need_per_node": request.per_node, "largest_node": largest, "flavour": flavour}
        return Reason("larger_than_any_node", figures | {"excluded": excluded}, flavour)
    enough = sum(amount >= request.per_node for amount in size.values())
    if request.shape != "mig" and enough < request.nodes:
        figures = {"need_nodes": request.nodes, "large_enough": enough, "flavour": flavour}
        return Reason("too_few_nodes", figures | {"excluded": excluded}, flavour)
    free = {
        node.node.id: count_places(cards_for(node, everything, request, need), everything, request)
        for node in usable
    }
    fitting = [node for node in usable if free[node.node.id] >= request.per_node]
    if (
        len(fitting) >= request.nodes
        and sum(host_fits(n, everything, request) for n in fitting) < request.nodes
    ):
        return _host_short(fitting, request, everything, flavour)
    if len(fitting) >= request.nodes > 1:
        by_site: dict[str, int] = {}
        for node in fitting:
            by_site[node.node.site] = by_site.get(node.node.site, 0) + 1
        figures = {"need_nodes": request.nodes, "best_in_one_site": max(by_site.values()), "flavour": flavour}
        return Reason("split_over_sites", figures | {"sites": by_site}, flavour)
    if request.shape == "fraction":
        return _no_card(usable, request, need, excluded)
    return _no_node(usable, free, size, request, need, excluded, policy)


def _no_node(
    usable: Sequence[NodeState],
    free: Mapping[int, int],
    size: Mapping[int, int],
    request: Request,
    need: Need,
    excluded: list[dict[str, Any]],
    policy: Policy,
) -> Reason:
    total, best = sum(free.values()), max(free.values())
    installed = sum(size.values())
    if request.shape == "mig":
        figures: dict[str, Any] = {
            "profile": request.profile,
            "need": request.per_node,
            "best_free_on_one_node": best,
            "free": total,
            "existing": installed,
            "flavour": need.flavour,
            "excluded": excluded,
        }
        return Reason("no_slice_free", figures, need.flavour)
    if total == 0:
        figures = {
            "flavour": need.flavour,
            "need": request.per_node * request.nodes,
            "installed": installed,
            "free": 0,
            "excluded": excluded,
        }
        return Reason("waiting_for_release", figures, need.flavour)
    told = sorted(
        (node for node in usable if free[node.node.id]), key=lambda node: (-free[node.node.id], node.node.id)
    )
    figures = {
        "flavour": need.flavour,
        "need_per_node": request.per_node,
        "need_nodes": request.nodes,
        "best_free_on_one_node": best,
        "nodes_that_fit": sum(amount >= request.per_node for amount in free.values()),
        "missing": max(0, request.per_node - best),
        "free": total,
        "installed": installed,
        "nodes": [
            {"node": node.node.name, "free": free[node.node.id], "of": size[node.node.id]}
            for node in told[: policy.nodes_told]
        ],
        "nodes_with_free": len(told),
        "excluded": excluded,
    }
    return Reason("no_node_fits", figures, need.flavour)


def _no_card(
    usable: Sequence[NodeState], request: Request, need: Need, excluded: list[dict[str, Any]]
) -> Reason:
    cards = [
        card
        for node in usable
        for card in node.gpus
        if gpu_refusal(card.gpu, request, need.flavour or "") is None
    ]
    figures = {
        "flavour": need.flavour,
        "need_milli": need.milli,
        "need_mib": need.share_mib,
        "need_cards": request.per_node,
        "best_free_milli": max((room(card.free) for card in cards), default=0),
        "best_free_mib": max((card.free_mib for card in cards if card.free), default=0),
        "excluded": excluded,
    }
    return Reason("no_card_fits", figures, need.flavour)


def _host_short(nodes: Sequence[NodeState], request: Request, view: View, flavour: str | None) -> Reason:
    figures = {
        "flavour": flavour,
        "need_cpu_milli": request.cpu_milli,
        "best_cpu_milli": max(view.cpu(node) for node in nodes),
        "need_memory_mib": request.memory_mib,
        "best_memory_mib": max(view.memory(node) for node in nodes),
    }
    return Reason("host_short", figures, flavour)


def _capacity(node: NodeState, request: Request, need: Need) -> int:
    cards = [card for card in node.gpus if gpu_refusal(card.gpu, request, need.flavour or "") is None]
    if request.shape == "mig":
        return sum(one.profile == request.profile for card in cards for one in card.gpu.slices)
    return len(cards)


def _all_refused(
    request: Request,
    nodes: Sequence[NodeState],
    refused: Mapping[str, Sequence[NodeState]],
    excluded: list[dict[str, Any]],
    flavour: str | None,
) -> Reason:
    # What the request itself asks for explains more than the state of single nodes.
    for code, attribute in (("driver_too_old", "driver"), ("cuda_too_old", "cuda")):
        if code in refused:
            wanted = request.min_driver if attribute == "driver" else request.min_cuda
            newest = max(getattr(node.node, attribute) for node in refused[code])
            figures: dict[str, Any] = {
                "flavour": flavour,
                "needed": _dotted(wanted),
                "newest": _dotted(newest),
                "nodes": len(refused[code]),
                "excluded": excluded,
            }
            return Reason(code, figures, flavour)
    if set(refused) == {"other_site"}:
        sites = sorted({node.node.site for node in nodes})
        return Reason("other_site", {"flavour": flavour, "site": request.site, "sites": sites}, flavour)
    if set(refused) == {"nvlink_absent"}:
        return Reason("nvlink_absent", {"flavour": flavour, "nodes": len(nodes)}, flavour)
    figures = {"flavour": flavour, "nodes": len(nodes), "excluded": excluded}
    return Reason("nodes_unavailable", figures, flavour)


def _excluded(refused: Mapping[str, Sequence[NodeState]], policy: Policy) -> list[dict[str, Any]]:
    return [
        {
            "because": because,
            "count": len(refused[because]),
            "nodes": [node.node.name for node in refused[because][: policy.nodes_told]],
        }
        for because in sorted(refused)
    ]


def _dotted(version: Sequence[int]) -> str:
    return ".".join(str(part) for part in version)
