"""Which nodes a gang takes: the closest-knit group that holds it, and in it the nodes that cost least.

Groups are tried from tight to loose and the first in which enough nodes fit is taken; among several groups of one
level the cheapest. From tight to loose: an NVLink island, then the places below the cluster from the finest (switch,
rack, row) to the coarsest, an island of InfiniBand, RoCE or Ethernet, the cluster, the site. A gang never crosses
sites; a fabric or domain that is required holds at every level. Replicas that are spread need no common network: any
nodes do, of one site where possible.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import numpy as np

from pool.engine.fleet import Bools, Fleet, Floats, Ints
from pool.engine.model import Fabric, Node, Request

FABRICS = ("nvlink", "infiniband", "roce", "ethernet")
"""Kinds of networks that a gang prefers to share, the fastest first."""

Name = Callable[[Node], Hashable | None]


def choose(fleet: Fleet, cost: Floats, request: Request) -> list[int] | None:
    """Rows of ``request.nodes`` nodes (an elastic request: as many as there are, at least its minimum), the cheapest
    first, or None. ``cost`` by row; infinite where a member does not fit."""
    fitting = np.flatnonzero(np.isfinite(cost))
    least = request.nodes if request.min_nodes is None else min(request.nodes, max(1, request.min_nodes))
    if len(fitting) < least:
        return None
    groups = levels(fleet, request)
    wanted = request.nodes
    if least < wanted:
        loosest = groups[-1][fitting]
        sizes = np.bincount(loosest[loosest >= 0], minlength=1)
        wanted = min(wanted, int(sizes.max()))
        if wanted < least:
            return None
    for group in groups:
        found = _cheapest(group[fitting], fitting, cost[fitting], wanted)
        if found is not None:
            return found
    return None


def largest_group(fleet: Fleet, fits: Bools, request: Request) -> int:
    """How many of the nodes that fit are in one group of the loosest kind that a gang may take."""
    group = levels(fleet, request)[-1][fits]
    group = group[group >= 0]
    return int(np.bincount(group).max()) if len(group) else 0


def levels(fleet: Fleet, request: Request) -> list[Ints]:
    """Group numbers of all nodes per level, tight to loose; −1 where a node has no group on that level."""
    if request.spread:
        return [_grouped(fleet, ("site",), (_site,)), _grouped(fleet, ("all",), (_anywhere,))]
    fixed_key: tuple[Hashable, ...] = (request.fabric, request.min_fabric_gbps, request.domain_required)
    fixed: list[Name] = [_site]
    if request.fabric:
        fixed.append(partial(island, request.fabric, request.min_fabric_gbps))
    deepest = max((len(node.domain) for node in fleet.nodes), default=0)
    required = request.domain_required or 0
    if required:
        fixed.append(partial(domain, required))
    start = deepest if request.domain_preferred is None else max(required, request.domain_preferred)
    kinds = {fabric.kind for node in fleet.nodes for fabric in node.fabrics}
    ladder: list[tuple[Hashable, Name]] = []
    if "nvlink" in kinds:
        ladder.append(("nvlink", partial(island, "nvlink", 0)))
    ladder += [(depth, partial(domain, depth)) for depth in range(start, max(required, 1) - 1, -1)]
    if not required:
        ladder += [(kind, partial(island, kind, 0)) for kind in FABRICS[1:] if kind in kinds]
        ladder += [("cluster", cluster), ("site", _site)]
    return [_grouped(fleet, (*fixed_key, key), (*fixed, name)) for key, name in ladder]


def island(kind: str, min_gbps: int, node: Node) -> Hashable | None:
    """The island of a node's fastest network of a kind, or None where it has none that is fast enough.

    A network without a named island joins the nodes of one cluster.
    """
    found = [fabric for fabric in node.fabrics if fabric.kind == kind and fabric.gbps >= min_gbps]
    if not found:
        return None
    best: Fabric = min(found, key=lambda fabric: (-fabric.gbps, fabric.domain))
    return best.domain or cluster(node)


def domain(depth: int, node: Node) -> Hashable | None:
    """The place of a node down to a depth below its cluster, or None where less is known of it."""
    known = len(node.domain) >= depth and node.domain[depth - 1]
    return (*cluster(node), *node.domain[:depth]) if known else None


def cluster(node: Node) -> tuple[str, int]:
    return node.site, node.cluster_id


def _site(node: Node) -> Hashable:
    return node.site


def _anywhere(node: Node) -> Hashable:
    return ""


def _grouped(fleet: Fleet, key: tuple[Hashable, ...], names: tuple[Name, ...]) -> Ints:
    def name(node: Node) -> Hashable | None:
        parts = tuple(one(node) for one in names)
        return None if None in parts else parts

    return fleet.group_of(("gang", *key), name)


def _cheapest(group: Ints, rows: Ints, cost: Floats, wanted: int) -> list[int] | None:
    """The ``wanted`` cheapest nodes of the group where they cost least together; ties by the lowest row."""
    sizes = np.bincount(group[group >= 0], minlength=1)
    enough = np.flatnonzero(sizes >= wanted)
    if not len(enough):
        return None
    keep = np.isin(group, enough)
    group, rows, cost = group[keep], rows[keep], cost[keep]
    order = np.lexsort((rows, cost, group))
    group, rows, cost = group[order], rows[order], cost[order]
    start = np.flatnonzero(np.diff(group, prepend=-1))
    totals = np.array([cost[first : first + wanted].sum() for first in start])
    leads = rows[start]
    first = int(start[np.lexsort((leads, totals))[0]])
    return [int(row) for row in rows[first : first + wanted]]
