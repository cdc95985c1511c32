"""Why a request waits: one stable code with the figures behind it, from the rules it failed first.

Codes, each with its figures:
    not_before            start_at, kept: whether places are kept for it from then on
    user_limit            limit, used, requested
    running_limit         limit, used, requested (pieces of work)
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
    split_over_domains    need_nodes, best_together, level: enough nodes, but not in one domain of that level
    split_over_fabrics    need_nodes, best_together, fabric: enough nodes, but not on one network of that kind
    outside_domain, domain_unknown, fabric_absent, storage_absent, dataset_absent, images_absent
                          asked, nodes, excluded: no node that may take work has it
    no_card_fits          need_milli, need_mib, best_free_milli, best_free_mib, flavour, excluded
    no_slice_free         profile, need, best_free_on_one_node, free, existing, flavour
    host_short            need_cpu_milli, best_cpu_milli, need_memory_mib, best_memory_mib
    waiting_for_release   flavour, need, installed, free: everything of it is in use
    behind                requests, reserved_from: it fits now but would delay them
    closed_soon           closed_from, flavour: it fits now but would still run when nodes are closed
    making_room           evicts, until, flavour: work ends so that it can start

Where a request has a deadline, its reason also says ``deadline_at`` and ``deadline_met``: whether it can still
be met by what is known (None: nothing is known).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pool.engine.fit import Need, flavour_refusal
from pool.engine.fleet import Fleet
from pool.engine.gang import largest_group
from pool.engine.model import Estimate, FlavourFacts, Policy, Request
from pool.engine.placement import largest_free, places_free, places_there
from pool.engine.state import PoolState
from quotas.engine.available import LevelCheck


class Reason(NamedTuple):
    code: str
    figures: Mapping[str, Any]
    flavour: str | None = None


def quota_blocked(flavour: str, check: LevelCheck, available: int) -> Reason:
    """The reason of an ask that a quota level refuses; ``available``: what it would let pass now."""
    figures = {
        "level": check.level,
        "rule": check.rule,
        "limit": check.limit,
        "used": check.used,
        "requested": check.requested,
        "available": available,
        "flavour": flavour,
    }
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
    fleet, flavour = state.fleet, need.flavour
    usable, refused = fleet.usable(request, flavour)
    rows = sorted([*usable, *(row for some in refused.values() for row in some)]) if refused else usable
    if not rows:
        return Reason("model_absent", {"flavours": list(request.flavours)}, flavour)
    excluded = _excluded(fleet, refused, policy)
    if not usable:
        return _all_refused(fleet, request, rows, refused, excluded, flavour)
    if request.shape == "cpu":
        return _host_short(state, usable, request, None)
    size = places_there(fleet, request, need)[usable]
    largest = int(size.max())
    if request.shape != "mig" and largest < request.per_node:
        figures = {"need_per_node": request.per_node, "largest_node": largest, "flavour": flavour}
        return Reason("larger_than_any_node", figures | {"excluded": excluded}, flavour)
    enough = int((size >= request.per_node).sum())
    if request.shape != "mig" and enough < request.nodes:
        figures = {"need_nodes": request.nodes, "large_enough": enough, "flavour": flavour}
        return Reason("too_few_nodes", figures | {"excluded": excluded}, flavour)
    free = places_free(state, request, need)[usable]
    fitting = [row for row, places in zip(usable, free.tolist(), strict=True) if places >= request.per_node]
    if len(fitting) >= request.nodes:
        hosted = [row for row in fitting if _host_fits(state, row, request)]
        if len(hosted) < request.nodes:
            return _host_short(state, fitting, request, flavour)
        if request.nodes > 1:
            return _apart(fleet, hosted, request, flavour)
    if request.shape == "fraction":
        return _no_card(state, usable, request, need, excluded)
    return _no_node(fleet, usable, free.tolist(), size.tolist(), request, need, excluded, policy)


def _apart(fleet: Fleet, fitting: Sequence[int], request: Request, flavour: str | None) -> Reason:
    """Enough nodes have room for a member each, but not together as a gang must be."""
    by_site: dict[str, int] = {}
    for row in fitting:
        site = fleet.nodes[row].site
        by_site[site] = by_site.get(site, 0) + 1
    figures: dict[str, Any] = {"need_nodes": request.nodes, "flavour": flavour}
    if max(by_site.values()) < request.nodes:
        figures |= {"best_in_one_site": max(by_site.values()), "sites": by_site}
        return Reason("split_over_sites", figures, flavour)
    fits = np.zeros(len(fleet), dtype=bool)
    fits[list(fitting)] = True
    figures["best_together"] = largest_group(fleet, fits, request)
    if request.domain_required:
        return Reason("split_over_domains", figures | {"level": request.domain_required}, flavour)
    return Reason("split_over_fabrics", figures | {"fabric": request.fabric}, flavour)


def _no_node(
    fleet: Fleet,
    usable: Sequence[int],
    free: Sequence[int],
    size: Sequence[int],
    request: Request,
    need: Need,
    excluded: list[dict[str, Any]],
    policy: Policy,
) -> Reason:
    total, best, installed = sum(free), max(free), sum(size)
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
    fitting = sum(there >= request.per_node for there in free)
    told = sorted((-there, row, of) for row, there, of in zip(usable, free, size, strict=True) if there)
    figures = {
        "flavour": need.flavour,
        "need_per_node": request.per_node,
        "need_nodes": request.nodes,
        "best_free_on_one_node": best,
        "nodes_that_fit": fitting,
        "nodes_missing": max(0, request.nodes - fitting),
        "missing": max(0, request.per_node - best),
        "free": total,
        "installed": installed,
        "nodes": [
            {"node": fleet.nodes[row].name, "free": -there, "of": of}
            for there, row, of in told[: policy.nodes_told]
        ],
        "nodes_with_free": len(told),
        "excluded": excluded,
    }
    return Reason("no_node_fits", figures, need.flavour)


def _no_card(
    state: PoolState, usable: Sequence[int], request: Request, need: Need, excluded: list[dict[str, Any]]
) -> Reason:
    milli, mib = largest_free(state, request, need, usable)
    figures = {
        "flavour": need.flavour,
        "need_milli": need.milli,
        "need_mib": need.share_mib,
        "need_cards": request.per_node,
        "best_free_milli": milli,
        "best_free_mib": mib,
        "excluded": excluded,
    }
    return Reason("no_card_fits", figures, need.flavour)


def _host_fits(state: PoolState, row: int, request: Request) -> bool:
    return state.cpu[row] >= request.cpu_milli and state.memory[row] >= request.memory_mib


def _host_short(state: PoolState, rows: Sequence[int], request: Request, flavour: str | None) -> Reason:
    figures = {
        "flavour": flavour,
        "need_cpu_milli": request.cpu_milli,
        "best_cpu_milli": max(max(0, state.cpu[row]) for row in rows),
        "need_memory_mib": request.memory_mib,
        "best_memory_mib": max(max(0, state.memory[row]) for row in rows),
    }
    return Reason("host_short", figures, flavour)


def _all_refused(
    fleet: Fleet,
    request: Request,
    rows: Sequence[int],
    refused: Mapping[str, Sequence[int]],
    excluded: list[dict[str, Any]],
    flavour: str | None,
) -> Reason:
    # What the request itself asks for explains more than the state of single nodes.
    for code, attribute in (("driver_too_old", "driver"), ("cuda_too_old", "cuda")):
        if code in refused:
            wanted = request.min_driver if attribute == "driver" else request.min_cuda
            newest = max(getattr(fleet.nodes[row], attribute) for row in refused[code])
            figures: dict[str, Any] = {
                "flavour": flavour,
                "needed": _dotted(wanted),
                "newest": _dotted(newest),
                "nodes": len(refused[code]),
                "excluded": excluded,
            }
            return Reason(code, figures, flavour)
    if set(refused) == {"other_site"}:
        sites = sorted({fleet.nodes[row].site for row in rows})
        return Reason("other_site", {"flavour": flavour, "site": request.site, "sites": sites}, flavour)
    if set(refused) == {"nvlink_absent"}:
        return Reason("nvlink_absent", {"flavour": flavour, "nodes": len(rows)}, flavour)
    for code, asked in _ASKED_OF_NODES.items():
        if code in refused:
            figures = {"flavour": flavour, "nodes": len(refused[code]), "excluded": excluded}
            return Reason(code, figures | {"asked": asked(request)}, flavour)
    figures = {"flavour": flavour, "nodes": len(rows), "excluded": excluded}
    return Reason("nodes_unavailable", figures, flavour)


_ASKED_OF_NODES: Mapping[str, Callable[[Request], Any]] = {
    "outside_domain": lambda request: list(request.within),
    "domain_unknown": lambda request: request.domain_required,
    "fabric_absent": lambda request: {"kind": request.fabric, "gbps": request.min_fabric_gbps},
    "storage_absent": lambda request: request.storage,
    "dataset_absent": lambda request: list(request.datasets),
    "images_absent": lambda request: request.image,
}
"""What a request asks of nodes beside their cards, by the code of nodes that lack it."""


def _excluded(fleet: Fleet, refused: Mapping[str, Sequence[int]], policy: Policy) -> list[dict[str, Any]]:
    return [
        {
            "because": because,
            "count": len(refused[because]),
            "nodes": [fleet.nodes[row].name for row in refused[because][: policy.nodes_told]],
        }
        for because in sorted(refused)
    ]


def _dotted(version: Sequence[int]) -> str:
    return ".".join(str(part) for part in version)
