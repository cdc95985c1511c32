"""What the scheduler sees and what it answers: plain immutable data.

Times are milliseconds since 1970 (UTC). Amounts are milli-GPU, MiB and milli-CPU. Ids are those of the
database and double as the fixed order of every tie. A span is [from, to) within a card's [0, 1000).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pool.engine.mig import Geometry
from quotas.engine.flavours import FlavourPolicy
from quotas.engine.tree import QuotaNode

Span = tuple[int, int]
WHOLE: Span = (0, 1000)
Shape = Literal["whole", "fraction", "mig", "cpu"]
Version = tuple[int, ...]


def version_of(text: str) -> Version:
    """A dotted version as numbers: ``"550.54.15"`` → (550, 54, 15); what is not a number ends it; "" → ()."""
    parts: list[int] = []
    for part in text.strip().split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class FlavourFacts:
    """A flavour on offer: what a requirement may ask of it."""

    code: str
    memory_mib: int
    nvlink: bool = False
    fp8: bool = False
    geometry: Geometry | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """A MIG instance that exists on a card now."""

    id: int
    profile: str
    span: Span
    charge_milli: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card. ``blocked`` is the reason code why nothing new may be placed on it, or None; ``power_mw`` what it
    may draw, 0 = not known."""

    id: int
    index: int
    flavour: str
    memory_mib: int
    blocked: str | None = None
    mig: bool = False
    slices: tuple[Slice, ...] = ()
    link_group: int = 0
    power_mw: int = 0


@dataclass(frozen=True, slots=True)
class Fabric:
    """A network that joins nodes. PCIe and a card's memory bandwidth are no fabrics.

    ``kind``: nvlink, infiniband, roce or ethernet; ``gbps`` per node; ``domain`` names the island: nodes
    whose fabric of one kind has the same domain reach each other over it.
    """

    kind: str
    gbps: int
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A server. ``cpu_milli`` and ``memory_mib`` None = not known, taken as ample.

    ``domain``: its place below the cluster from coarse to fine (row, rack, switch); a domain is its whole
    path. ``datasets``: codes of the data sets that lie or are cached here. ``no_images``: nothing on it runs container
    images. ``power_headroom_mw``: what may be
    drawn beyond what is drawn now, None = not limited. ``caution``: its health is in some doubt (a late sign of
    life, errors that healed), so it is used last.
    """

    id: int
    name: str
    cluster_id: int
    site: str
    gpus: tuple[Gpu, ...]
    cpu_milli: int | None = None
    memory_mib: int | None = None
    driver: Version = ()
    cuda: Version = ()
    nvlink: bool = False
    blocked: str | None = None
    cpu_only: bool = False
    domain: tuple[str, ...] = ()
    fabrics: tuple[Fabric, ...] = ()
    storage: frozenset[str] = frozenset()
    datasets: frozenset[str] = frozenset()
    power_headroom_mw: int | None = None
    caution: bool = False
    no_images: bool = False
    closed: tuple[tuple[int, int], ...] = ()
    """Maintenance to come: [from, to) in which nothing may run here, in order of time. Work that would still run
    at the beginning of one is not placed; what ends before it may fill the time up to it."""


@dataclass(frozen=True, slots=True)
class Take:
    """What one lease takes of one card: spans (or a MIG slice) and the charge."""

    gpu_id: int
    spans: tuple[Span, ...]
    charge_milli: int
    memory_mib: int
    slice_id: int | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """One node's part of an allocation; ``number`` is the rank in the gang."""

    number: int
    node_id: int
    cpu_milli: int
    memory_mib: int
    takes: tuple[Take, ...]


@dataclass(frozen=True, slots=True)
class Running:
    """An allocation that holds something. ``ends_at`` None = no end known."""

    allocation_id: int
    request_id: int
    department_id: int
    flavour: str | None
    charge_milli: int
    members: tuple[Member, ...]
    interruptible: bool = True
    priority: int = 50
    started_at: int = 0
    ends_at: int | None = None
    user_id: int | None = None
    ending: bool = False
    """It is being stopped already: its places come back without a further eviction."""
    spared: bool = False
    """Its department's mode (pilot, or roll-out and not willing) keeps it from being taken back."""
    evictions: int = 0
    """How often its request was displaced so far."""
    movable: bool = False
    """It can be started elsewhere from its checkpoint (opt-in of consolidation)."""
    evictable_after: int = 0
    """Not before this moment, whatever the minimum run time says (back-off after repeated evictions)."""
    apart: int | None = None
    """The group whose other members stand on other nodes where possible: replicas of one service."""
    min_nodes: int | None = None
    """A gang that shrinks: members beyond this many may be taken alone."""
    asks: Request | None = None
    """What it asked for, needed to move it (with ``movable``)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One ask that waits. ``flavours`` are the acceptable ones in order; one of them is charged.

    ``per_node``: whole cards, fractions (each of ``milli`` and ``share_mib``) or MIG slices on each of
    ``nodes`` nodes; for MIG, ``nodes`` is 1. ``cpu_milli``/``memory_mib`` per node, 0 = the node's share by
    GPUs, never blocking.
    ``duration_ms`` None = no end. ``queued_at`` keeps the place in line after a lost node.
    """

    id: int
    department_id: int
    flavours: tuple[str, ...]
    shape: Shape = "whole"
    per_node: int = 1
    nodes: int = 1
    milli: int = 0
    share_mib: int = 0
    profile: str = ""
    cpu_milli: int = 0
    memory_mib: int = 0
    min_gpu_mib: int = 0
    nvlink: bool = False
    fp8: bool = False
    min_driver: Version = ()
    min_cuda: Version = ()
    site: str = ""
    ranked: bool = False
    job_class: str = "training"
    priority: int = 50
    interruptible: bool = True
    duration_ms: int | None = None
    queued_at: int = 0
    start_at: int | None = None
    user_id: int | None = None
    min_nodes: int | None = None
    """Elastic: starts with as many nodes as there are, but at least this many. None = all or nothing."""
    domain_required: int | None = None
    """Depth of ``Node.domain`` that all nodes must share (1 = the coarsest level); None = anywhere."""
    domain_preferred: int | None = None
    fabric: str = ""
    """Kind of network that all nodes of a gang must share; with ``min_fabric_gbps`` per node."""
    min_fabric_gbps: int = 0
    storage: str = ""
    datasets: tuple[str, ...] = ()
    stage_datasets: bool = True
    """False: only nodes that have all data sets; True: such nodes are preferred, others get them staged."""
    image: bool = False
    """It runs a container image: only nodes that can."""
    spread: bool = False
    """Replicas of a service: on different nodes where possible (members need not share a fabric)."""
    deadline_at: int | None = None
    evictions: int = 0
    displaced_by: tuple[int, ...] = ()
    """Departments that displaced it: it does not displace them in turn unless they are above their share by
    a margin."""
    evicts_after: int = 0
    """It may not displace anybody before this moment (back-off after repeated evictions)."""
    apart: int | None = None
    """The group whose other members it keeps away from where possible (replicas, each a request of its own)."""
    avoid: frozenset[int] = frozenset()
    """Nodes that cost more: filled in by the decision, where others of ``apart`` stand."""
    within: tuple[str, ...] = ()
    """Only nodes whose ``domain`` begins with this path."""
    parts: tuple[Request, ...] = ()
    """A gang of unlike members, or of members that may share a node: all of these are placed, or none. The
    charge is their sum; shape and size of the request itself say nothing then."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Places freed for a preemptor and held for its request until it starts, leaves, or ``until``."""

    request_id: int
    members: tuple[Member, ...]
    until: int


@dataclass(frozen=True, slots=True)
class UserRoom:
    """A person's limits on GPUs and on pieces of work at once (None = none), and what they hold now."""

    limit_milli: int | None
    used_milli: int
    limit_runs: int | None = None
    runs: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one decision looks at. The order of the tuples never matters."""

    nodes: tuple[Node, ...]
    flavours: tuple[FlavourFacts, ...]
    running: tuple[Running, ...]
    pending: tuple[Request, ...]
    quotas: Mapping[str, tuple[QuotaNode, ...]] = field(default_factory=dict)
    users: Mapping[int, UserRoom] = field(default_factory=dict)
    kept: tuple[Kept, ...] = ()
    user_use: Mapping[int, int] = field(default_factory=dict)
    """Decayed use per person in milli-GPU-hours, for the option that orders people within a department."""
    minimum_run: Mapping[int, MinimumRun] = field(default_factory=dict)
    """Per department that sets one; resolved over the tree as the case files' ``min_runtime`` says."""
    mix: Mix | None = None
    """The workload learnt from history, for placement; None = from what runs and waits now."""
    promised: tuple[Reserve, ...] = ()
    """Promises of the last whole plan. They hold in a decision about some requests only, which makes none of
    its own for others; a whole decision makes its promises anew."""


@dataclass(frozen=True, slots=True)
class MinimumRun:
    """Milliseconds that work is left alone after its last start; None = as the parent says."""

    preempt_ms: int | None = None
    reclaim_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TaskClass:
    """One kind of work in the history: host CPU, cards and milli-GPU of each, models it accepts (empty =
    any)."""

    cpu_milli: int
    per_node: int
    milli: int
    flavours: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mix:
    """How often each class arrived (counts, any scale)."""

    classes: tuple[tuple[TaskClass, int], ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """Every switch of a decision; the defaults are the product's behaviour.

    ``queueing`` strict: nobody passes the first request of a flavour that waits for a place.
    """

    max_reservations: int = 5
    queueing: Literal["best_effort", "strict"] = "best_effort"
    flavour: FlavourPolicy = FlavourPolicy()
    scarcity: bool = True
    estimate_slack_permille: int = 250
    estimate_min_slack_ms: int = 600_000
    overdue_ms: int = 60_000
    nodes_told: int = 8
    windows_ahead_ms: int = 14 * 86_400_000
    window_lead_ms: int = 600_000
    """So long before a reserved window begins, what its request may take back is taken: more than the grace."""
    reclaim: bool = True
    """An owner below its guarantee takes back what others borrow."""
    reclaim_patience_ms: int = 0
    """An owner's new ask for one card, or a part of one, waits so long for work that ends by itself, as the first in
    line, before others give way."""
    preempt: bool = True
    """Strictly higher priority displaces interruptible work of the same department."""
    preempt_equal: bool = False
    rebalance: bool = False
    """Borrowers displace each other for fairness; off: only owners reclaim."""
    consolidate: bool = False
    """Movable work is moved where that lets a blocked request start."""
    min_run_preempt_ms: int = 0
    min_run_reclaim_ms: int = 0
    displace_margin_permille: int = 100
    """Who was displaced displaces in turn only those above their share by this margin."""
    evictions_back_off: int = 3
    back_off_ms: int = 3_600_000
    keep_for_preemptor_ms: int = 900_000
    max_victims: int = 64
    """For one request; more would be disturbed than it is worth."""
    max_preemptors: int = 32
    """So many requests have room made for them in one decision; the next one goes on."""
    max_searches: int = 512
    """So many times room is sought in one decision."""
    user_decay: bool = False
    order: Literal["guarantee", "tournament"] = "guarantee"
    class_weights: Mapping[str, int] = field(default_factory=dict)
    """Within a department and a priority, classes of work with a higher weight come first; 1 where none is given."""


@dataclass(frozen=True, slots=True)
class Place:
    """Start a request on these places. ``borrowed_milli``: how much of it lies above the guarantee."""

    request_id: int
    flavour: str | None
    charge_milli: int
    borrowed_milli: int
    members: tuple[Member, ...]
    ends_at: int | None


@dataclass(frozen=True, slots=True)
class Reserve:
    """Keep these places for a blocked request from ``start_at`` on."""

    request_id: int
    flavour: str
    start_at: int
    members: tuple[Member, ...]


EvictCause = Literal["reclaim", "preempt", "rebalance", "consolidate"]


@dataclass(frozen=True, slots=True)
class Evict:
    """Take a running allocation back so that ``for_request_id`` can start. ``members`` empty = all of it.

    ``rule`` is a code; ``figures`` are the sums it rests on (levels, use, guarantee, share before and
    after). The places of the request are in the plan's ``keeps``.
    """

    allocation_id: int
    for_request_id: int
    cause: EvictCause
    rule: str
    figures: Mapping[str, Any]
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """Consolidation: stop an allocation and start its request again on ``members``."""

    allocation_id: int
    for_request_id: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Split a drained card anew: the profiles with their first memory slot, in order of slot."""

    gpu_id: int
    for_request_id: int
    profiles: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A start range and the code of what it rests on; never a single moment."""

    earliest: int
    latest: int
    basis: str


class Waiting(NamedTuple):
    """Why a request waits: ``code`` with its ``figures``; ``position`` counts from 1 among those for its
    flavour.
    """

    request_id: int
    code: str
    figures: Mapping[str, Any]
    flavour: str | None
    position: int
    of: int
    ahead: tuple[int, ...]
    estimate: Estimate | None = None
    reserved: Reserve | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer: operations in the order to carry out, and one reason for every request that waits."""

    places: tuple[Place, ...]
    reserves: tuple[Reserve, ...]
    waiting: tuple[Waiting, ...]
    evicts: tuple[Evict, ...] = ()
    keeps: tuple[Kept, ...] = ()
    moves: tuple[Move, ...] = ()
    layouts: tuple[Layout, ...] = ()
    spared: tuple[Evict, ...] = ()
    """What would have been taken back had the victim's department not been in pilot or roll-out mode."""

    @property
    def ops(self) -> tuple[Place | Reserve | Evict | Kept | Move | Layout, ...]:
        return (*self.places, *self.evicts, *self.moves, *self.layouts, *self.keeps, *self.reserves)
