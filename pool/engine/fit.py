"""Which nodes and cards may serve a request at all, and what one member of it needs."""

from __future__ import annotations

from dataclasses import dataclass

from pool.engine.model import FlavourFacts, Gpu, Node, Request
from quotas.engine.charge import fraction_charge, whole_charge


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes of one flavour: ``milli`` per card or slice, ``charge_milli`` in all."""

    flavour: str | None
    milli: int
    share_mib: int
    charge_milli: int


def need_of(request: Request, facts: FlavourFacts | None) -> Need | None:
    """The need of a request on a flavour, or None when the flavour cannot serve its shape (no such MIG
    profile).

    Raises ChargeError for a fraction that exceeds a card of the flavour.
    """
    if request.shape == "cpu" or facts is None:
        return Need(None, 0, 0, 0)
    count = request.per_node * request.nodes
    if request.shape == "whole":
        return Need(facts.code, 1000, 0, whole_charge(count))
    if request.shape == "fraction":
        if request.share_mib > facts.memory_mib:
            return None
        charge = fraction_charge(request.milli, request.share_mib, facts.memory_mib)
        mib = request.share_mib or facts.memory_mib * request.milli // 1000
        return Need(facts.code, charge, mib, charge * count)
    if facts.geometry is None or facts.geometry.profile(request.profile) is None:
        return None
    charge = facts.geometry.charge(request.profile)
    return Need(facts.code, charge, 0, charge * count)


def flavour_refusal(request: Request, facts: FlavourFacts | None) -> str | None:
    """Why no card of a flavour can serve the request, whatever is free; None when it can."""
    if facts is None:
        return "model_absent"
    if request.min_gpu_mib and facts.memory_mib < request.min_gpu_mib:
        return "memory_too_small"
    if request.fp8 and not facts.fp8:
        return "fp8_absent"
    if request.nvlink and not facts.nvlink:
        return "nvlink_absent"
    if request.shape == "fraction" and request.share_mib > facts.memory_mib:
        return "memory_too_small"
    if request.shape == "mig" and (facts.geometry is None or facts.geometry.profile(request.profile) is None):
        return "mig_profile_absent"
    return None


def node_refusal(node: Node, request: Request) -> str | None:
    """Why a node cannot serve the request, whatever is free on it; None when it can."""
    if request.site and node.site != request.site:
        return "other_site"
    if node.blocked is not None:
        return node.blocked
    if request.within and node.domain[: len(request.within)] != request.within:
        return "outside_domain"
    if (
        request.domain_required
        and request.nodes > 1
        and not any(node.domain[request.domain_required - 1 :][:1])
    ):
        return "domain_unknown"
    if request.fabric and not any(
        fabric.kind == request.fabric and fabric.gbps >= request.min_fabric_gbps for fabric in node.fabrics
    ):
        return "fabric_absent"
    if request.storage and request.storage not in node.storage:
        return "storage_absent"
    if not request.stage_datasets and not node.datasets.issuperset(request.datasets):
        return "dataset_absent"
    if request.image and node.no_images:
        return "images_absent"
    if request.shape != "cpu":
        if request.min_driver and node.driver < request.min_driver:
            return "driver_too_old"
        if request.min_cuda and node.cuda < request.min_cuda:
            return "cuda_too_old"
        if request.nvlink and request.per_node > 1 and not node.nvlink:
            return "nvlink_absent"
    return None


def gpu_refusal(gpu: Gpu, request: Request, flavour: str) -> str | None:
    """Why a card cannot serve the request, whatever is free on it; None when it can."""
    if gpu.flavour != flavour:
        return "other_model"
    if gpu.blocked is not None:
        return gpu.blocked
    if request.shape == "mig":
        return None if gpu.mig else "not_split"
    if gpu.mig:
        return "split_by_mig"
    if request.min_gpu_mib and gpu.memory_mib < request.min_gpu_mib:
        return "memory_too_small"
    return None


def host_share(node: Node, request: Request) -> tuple[int, int]:
    """Host CPU and memory wanted on a node: as asked, or the node's share by GPUs where nothing was said."""
    cards = max(1, len(node.gpus))
    part = min(request.per_node, cards) if request.shape == "whole" else 0
    cpu = request.cpu_milli or (node.cpu_milli or 0) * part // cards
    memory = request.memory_mib or (node.memory_mib or 0) * part // cards
    return cpu, memory


def partial_count(count: int, minimum: int | None, each: int, free: int) -> int:
    """How many of ``count`` equal parts of ``each`` cards start when ``free`` are there: as many as fit,
    none below ``minimum`` (None: all or nothing)."""
    fitting = min(count, free // each) if each > 0 else count
    return fitting if fitting >= (count if minimum is None else minimum) else 0
