"""Cases of kind cluster: nodes, queues, workloads of pods. ``decide`` is repeated until it changes nothing; stops
take no time, evicted pods are gone, nothing else finishes.

Without a ``policy`` a case runs under the rules of the scheduler it was taken from: an ask may be claimed up to the
fair share (``rebalance``), and preemptible work may be moved. With one, under the product's, with those switches.
A pod is a member of its own: pods of a gang may share a node, and may be unlike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from pool.engine.cases.common import Case, Result, scaled
from pool.engine.decide import decide
from pool.engine.mig import Geometry, Profile
from pool.engine.model import (
    WHOLE,
    Evict,
    FlavourFacts,
    Gpu,
    Kept,
    Member,
    Mix,
    Move,
    Node,
    Place,
    Plan,
    Policy,
    Request,
    Running,
    Slice,
    Snapshot,
    Take,
    TaskClass,
)
from pool.engine.world import HOST_CPU, HOST_MEMORY
from quotas.engine.tree import QuotaNode, QuotaTree

FLAVOUR = "gpu"
POOL = 0
"""The whole pool: above all queues without a parent."""
AMPLE_CPU_MILLI, AMPLE_MEMORY = 20_000, 20_000_000_000
SOURCE_POLICY = Policy(rebalance=True, consolidate=True, max_reservations=0, keep_for_preemptor_ms=1 << 40)
NOW = 1_000_000
ROUNDS = 200
"""So many decisions at most; a case that still changes then has no fixed point."""
CARDS_PER_NODE, WORKLOADS = 10_000, 1_000


def run_cluster(case: Case) -> Result:
    """Outcomes of all workloads and pods, and the operations of all plans in order."""
    return _Cluster(case).settle()


@dataclass(slots=True)
class Pod:
    """One pod through the case: ``request`` is what it asks, ``held`` where it is."""

    name: str
    row: dict[str, Any]
    outcome: str
    request: Request
    held: Member | None = None

    @property
    def live(self) -> bool:
        return self.outcome in ("kept", "moved", "placed")


@dataclass(slots=True)
class Workload:
    row: dict[str, Any]
    number: int
    pods: list[Pod]
    stopped: bool = False

    @property
    def least(self) -> int:
        return int(self.row["min_pods"])

    def live(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.live]

    def waiting(self) -> list[Pod]:
        return [] if self.stopped else [pod for pod in self.pods if pod.outcome == "waiting"]


class _Cluster:
    """A case as it plays out."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ops: list[dict[str, Any]] = []
        self.kept: tuple[Kept, ...] = ()
        self.policy = _policy(case.get("policy"))
        self.levels = sorted({level for node in case["nodes"] for level in node.get("domain") or {}})
        profiles = sorted({name for node in case["nodes"] for name in node.get("mig") or {}})
        profiles += sorted({name for pod in _pod_rows(case) for name in pod.get("mig") or {}} - set(profiles))
        self.geometry = Geometry("case", (), 1, 1, tuple(Profile(name, 1, 1, (0,), 1) for name in profiles))
        self.queues = {
            row["id"]: number
            for number, row in enumerate(
                sorted(case["queues"], key=lambda row: (row.get("created") or 0, row["id"])), 1
            )
        }
        self.memory = max((scaled(node.get("gpu_memory", 100)) for node in case["nodes"]), default=1000)
        self.nodes = [self._node(number, row) for number, row in enumerate(case["nodes"], 1)]
        self.node_number = {row["id"]: number for number, row in enumerate(case["nodes"], 1)}
        self.node_name = {number: name for name, number in self.node_number.items()}
        self.workloads = [self._workload(number, row) for number, row in enumerate(case["workloads"], 1)]
        self._seat()

    # Reading the case

    def _node(self, number: int, row: dict[str, Any]) -> Node:
        memory = scaled(row.get("gpu_memory", 100))
        first = number * CARDS_PER_NODE
        gpus = [Gpu(first + index, index, FLAVOUR, memory) for index in range(int(row["gpus"]))]
        for profile, count in sorted((row.get("mig") or {}).items()):
            for _ in range(count):
                card = first + len(gpus)
                whole = (Slice(card, profile, WHOLE, 1000, memory),)
                gpus.append(Gpu(card, len(gpus), FLAVOUR, memory, mig=True, slices=whole))
        unknown = any(
            pod.get("mig_without_profile") and pod.get("node") == row["id"] for pod in _pod_rows(self.case)
        )
        if unknown:
            gpus = [replace(gpu, blocked="layout_unknown") if gpu.mig else gpu for gpu in gpus]
        domain = row.get("domain") or {}
        path = []
        for level in self.levels:
            if level not in domain:
                break
            path.append(str(domain[level]))
        return Node(
            number,
            row["id"],
            1,
            "pool",
            tuple(gpus),
            cpu_milli=int(row.get("cpu_milli", AMPLE_CPU_MILLI)),
            memory_mib=int(row.get("memory", AMPLE_MEMORY)),
            nvlink=True,
            domain=tuple(path),
        )

    def _workload(self, number: int, row: dict[str, Any]) -> Workload:
        outcomes = {
            "running": "kept",
            "pending": "waiting",
            "terminating": "gone",
            "stuck_terminating": "stuck",
        }
        pods = [
            Pod(f"{row['id']}/{index}", pod, outcomes[pod["state"]], self._ask(number, index, row, pod))
            for index, pod in enumerate(row["pods"], 1)
        ]
        return Workload(row, number, pods)

    def _ask(self, number: int, index: int, row: dict[str, Any], pod: dict[str, Any]) -> Request:
        gpus, memory = scaled(pod.get("gpu") or 0), scaled(pod.get("gpu_memory") or 0)
        mig = pod.get("mig") or {}
        if len(mig) > 1:
            raise ValueError(f"{row['id']}: a pod with several MIG profiles")
        shape: Any = "cpu"
        values: dict[str, Any] = {"per_node": 0}
        if mig:
            ((profile, count),) = mig.items()
            shape, values = "mig", {"per_node": int(count), "profile": profile}
        elif gpus >= 1000:
            shape, values = "whole", {"per_node": gpus // 1000}
        elif gpus or memory:
            shape, values = "fraction", {"milli": gpus, "share_mib": memory}
        return Request(
            id=number * WORKLOADS + index,
            department_id=self.queues[row["queue"]],
            flavours=() if shape == "cpu" else (FLAVOUR,),
            shape=shape,
            cpu_milli=int(pod.get("cpu_milli") or 0),
            memory_mib=int(pod.get("memory") or 0),
            priority=row["priority"],
            interruptible=row["preemptible"],
            queued_at=row["age_rank"],
            **values,
        )

    def _seat(self) -> None:
        """Give every pod that stands somewhere its cards: named devices first, then whole ones, then shares."""
        standing = [
            (workload, pod) for workload in self.workloads for pod in workload.pods if pod.row.get("node")
            if pod.outcome in ("kept", "stuck")
        ]  # fmt: skip
        standing.sort(key=lambda one: ("device" not in one[1].row, one[1].request.shape != "whole"))
        seats = _Seats(self.nodes)
        for _, pod in standing:
            pod.held = seats.take(pod, self.node_number[pod.row["node"]], self.memory)

    # Deciding

    def settle(self) -> Result:
        for _ in range(ROUNDS):
            plan = decide(self._snapshot(), self.policy, NOW, explain=False)
            if not self._carry_out(plan) and not self._stop_incomplete():
                return self._result()
        raise ValueError("no fixed point")

    def _snapshot(self) -> Snapshot:
        running = tuple(one for workload in self.workloads for one in self._running(workload))
        return Snapshot(
            nodes=tuple(self.nodes),
            flavours=(FlavourFacts(FLAVOUR, self.memory, nvlink=True, geometry=self.geometry),),
            running=running,
            pending=tuple(one for workload in self.workloads for one in self._pending(workload)),
            quotas=self._quotas(running),
            kept=self.kept,
            mix=Mix(((TaskClass(0, 1, 1000), 1),)),
        )

    def _running(self, workload: Workload) -> Iterator[Running]:
        """The live pods as one allocation; what is stuck holds its place for itself, and cannot be taken."""
        live = [pod for pod in workload.pods if pod.live and pod.held is not None]
        if live:
            yield self._allocation(workload, live, workload.number, workload.row["preemptible"])
        for index, pod in enumerate(workload.pods):
            if pod.outcome == "stuck" and pod.held is not None:
                yield self._allocation(workload, [pod], WORKLOADS * (workload.number + 1) + index, False)

    def _allocation(self, workload: Workload, pods: list[Pod], number: int, preemptible: bool) -> Running:
        members = tuple(replace(pod.held, number=place) for place, pod in enumerate(pods) if pod.held)
        charge = sum(take.charge_milli for member in members for take in member.takes)
        asks = self._gang(workload, pods, ())
        elastic = workload.least if workload.least < len(pods) else None
        return Running(
            allocation_id=number,
            request_id=asks.id,
            department_id=asks.department_id,
            flavour=FLAVOUR if charge else None,
            charge_milli=charge,
            members=members,
            interruptible=preemptible,
            priority=workload.row["priority"],
            started_at=workload.row["age_rank"],
            movable=preemptible and charge > 0,
            asks=asks if charge else None,
            min_nodes=elastic,
        )

    def _pending(self, workload: Workload) -> Iterator[Request]:
        """What a gang lacks to be whole, as one; once it is whole, each further pod for itself."""
        waiting, live = workload.waiting(), workload.live()
        lacking = workload.least - len(live)
        within = self._domain_of(workload, live)
        if waiting and 0 < lacking <= len(waiting):
            yield self._gang(workload, waiting[:lacking], within)
        elif lacking <= 0:
            for pod in waiting:
                yield replace(pod.request, within=within)

    def _gang(self, workload: Workload, pods: list[Pod], within: tuple[str, ...]) -> Request:
        topology = workload.row.get("topology") or {}
        first = pods[0].request
        if len(pods) == 1 and not topology:
            return replace(first, within=within)
        depth = {level: index for index, level in enumerate(self.levels, 1)}
        return replace(
            first,
            flavours=next((pod.request.flavours for pod in pods if pod.request.flavours), ()),
            within=within,
            parts=tuple(pod.request for pod in pods),
            domain_required=None if within else depth.get(topology.get("required", "")),
            domain_preferred=depth.get(topology.get("preferred", "")),
        )

    def _domain_of(self, workload: Workload, live: list[Pod]) -> tuple[str, ...]:
        """The domain that a gang is bound to by the pods that run already."""
        level = (workload.row.get("topology") or {}).get("required")
        if not live or level is None or level not in self.levels:
            return ()
        held = live[0].held
        assert held is not None
        return self.nodes[held.node_id - 1].domain[: self.levels.index(level) + 1]

    def _quotas(self, running: Iterable[Running]) -> dict[str, tuple[QuotaNode, ...]]:
        total = 1000 * sum(gpu.blocked is None for node in self.nodes for gpu in node.gpus)
        trees = {FLAVOUR: self._tree(total, "deserved_gpus", "limit", 1000)}
        for code, limit, amount in (
            (HOST_CPU, "limit_cpu_milli", sum(node.cpu_milli or 0 for node in self.nodes)),
            (HOST_MEMORY, "limit_memory", sum(node.memory_mib or 0 for node in self.nodes)),
        ):
            if any(row.get(limit) is not None for row in self.case["queues"]):
                trees[code] = self._tree(amount, None, limit, 1)
        for one in running:
            for code, tree in trees.items():
                amount = one.charge_milli
                if code != FLAVOUR:
                    amount = sum(m.cpu_milli if code == HOST_CPU else m.memory_mib for m in one.members)
                tree.add(one.department_id, amount, interruptible=one.interruptible)
        return {code: tree.snapshot() for code, tree in trees.items()}

    def _tree(self, total: int, deserved: str | None, limit: str, scale: int) -> QuotaTree:
        nodes = [QuotaNode(POOL, guarantee=total)]
        for row in self.case["queues"]:
            guarantee: int | None = None
            if deserved is not None:
                given = row.get(deserved) or 0
                guarantee = total if given < 0 else scaled(given)
            cap = row.get(limit)
            nodes.append(
                QuotaNode(
                    self.queues[row["id"]],
                    self.queues[row["parent"]] if row.get("parent") is not None else POOL,
                    guarantee=guarantee,
                    hard_cap=None if cap is None or cap < 0 else int(cap * scale),
                    weight=scaled(row.get("weight", 1)),
                    priority=row.get("priority") or 0,
                )
            )
        return QuotaTree(nodes)

    # Carrying a plan out

    def _carry_out(self, plan: Plan) -> bool:
        for evict in plan.evicts:
            self._evict(evict)
        for move in plan.moves:
            self._move(move)
        for place in plan.places:
            self._place(place)
        moved = {self._by_allocation(move.allocation_id).number for move in plan.moves}
        self.kept = tuple(
            kept for kept in plan.keeps if self._by_request(kept.request_id).number not in moved
        )
        return bool(plan.evicts or plan.moves or plan.places)

    def _evict(self, evict: Evict) -> None:
        workload = self._by_allocation(evict.allocation_id)
        live = workload.live()
        gone = [pod for index, pod in enumerate(live) if not evict.members or index in evict.members]
        for pod in gone:
            pod.outcome, pod.held = "preempted", None
        workload.stopped = len(workload.live()) < workload.least
        self.ops.append(
            {
                "op": "evict",
                "pods": [pod.name for pod in gone],
                "for": self._by_request(evict.for_request_id).row["id"],
                "cause": evict.cause,
                "rule": evict.rule,
                "figures": self._named(evict.figures),
            }
        )

    def _named(self, figures: Any) -> dict[str, Any]:
        names = {number: name for name, number in self.queues.items()} | {POOL: None}
        sides = ("asking", "giving", "department")
        return {key: names.get(value) if key in sides else value for key, value in figures.items()}

    def _move(self, move: Move) -> None:
        workload = self._by_allocation(move.allocation_id)
        for pod, member in zip(workload.live(), move.members, strict=True):
            if pod.held is None or pod.held.takes != member.takes:
                pod.outcome, pod.held = ("moved" if pod.outcome != "placed" else "placed"), member
        self.ops.append({"op": "move", "pods": [self._told(pod) for pod in workload.live()]})

    def _place(self, place: Place) -> None:
        workload = self._by_request(place.request_id)
        index = place.request_id % WORKLOADS - 1
        lacking = workload.least - len(workload.live())
        pods = workload.waiting()[:lacking] if lacking > 0 else [workload.pods[index]]
        for pod, member in zip(pods, place.members, strict=True):
            pod.outcome, pod.held = "placed", member
        self.ops.append({"op": "place", "pods": [self._told(pod) for pod in pods]})

    def _stop_incomplete(self) -> bool:
        """A gang that stays incomplete is stopped: it would hold cards for nothing. Whether one was."""
        for workload in self.workloads:
            live = workload.live()
            if live and len(live) < workload.least:
                for pod in live:
                    pod.outcome, pod.held = "preempted", None
                workload.stopped = True
                self.ops.append({"op": "stop", "pods": [pod.name for pod in live], "rule": "incomplete_gang"})
                return True
        return False

    def _by_allocation(self, allocation_id: int) -> Workload:
        return self.workloads[allocation_id - 1]

    def _by_request(self, request_id: int) -> Workload:
        return self.workloads[request_id // WORKLOADS - 1]

    # The result

    def _told(self, pod: Pod) -> dict[str, Any]:
        told: dict[str, Any] = {"pod": pod.name, "outcome": pod.outcome}
        if pod.held is not None:
            first = pod.held.node_id * CARDS_PER_NODE
            told["node"] = self.node_name[pod.held.node_id]
            devices = [str(take.gpu_id - first) for take in pod.held.takes if take.slice_id is None]
            told["devices"] = devices
        return told

    def _result(self) -> Result:
        pods = {pod.name: self._told(pod) for workload in self.workloads for pod in workload.pods}
        return {
            "workloads": {one.row["id"]: {"outcome": _outcome(one)} for one in self.workloads},
            "pods": {name: {k: v for k, v in told.items() if k != "pod"} for name, told in pods.items()},
            "ops": self.ops,
        }


class _Seats:
    """Cards of the nodes while the pods that stand somewhere are given theirs."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.used: dict[int, int] = {}

    def take(self, pod: Pod, node_id: int, memory: int) -> Member:
        request, node = pod.request, self.nodes[node_id]
        takes: list[Take] = []
        if request.shape == "mig":
            free = [gpu for gpu in node.gpus if gpu.mig and gpu.id not in self.used]
            for gpu in [gpu for gpu in free if gpu.slices[0].profile == request.profile][: request.per_node]:
                self.used[gpu.id] = 1000
                takes.append(Take(gpu.id, (WHOLE,), 1000, gpu.memory_mib, gpu.slices[0].id))
        elif request.shape in ("whole", "fraction"):
            milli = 1000 if request.shape == "whole" else max(request.milli, 1)
            charge = max(milli, 1000 * request.share_mib // memory) if request.shape == "fraction" else 1000
            mib = 0 if request.shape == "whole" else request.share_mib or memory * milli // 1000
            for gpu in self._cards(pod, node, charge)[: request.per_node]:
                low = self.used.get(gpu.id, 0)
                self.used[gpu.id] = low + charge
                takes.append(Take(gpu.id, ((low, low + charge),), charge, mib))
        return Member(0, node_id, request.cpu_milli, request.memory_mib, tuple(takes))

    def _cards(self, pod: Pod, node: Node, charge: int) -> list[Gpu]:
        """Cards with room: the named one, else shared ones before empty ones for a share."""
        fitting = [gpu for gpu in node.gpus if not gpu.mig and self.used.get(gpu.id, 0) + charge <= 1000]
        named = pod.row.get("device")
        if named is not None and str(named).isdecimal():
            fitting.sort(key=lambda gpu: (gpu.index != int(named), gpu.index))
        else:
            fitting.sort(key=lambda gpu: (-self.used.get(gpu.id, 0), gpu.index))
        return fitting


def _pod_rows(case: Case) -> list[dict[str, Any]]:
    return [pod for workload in case["workloads"] for pod in workload["pods"]]


def _policy(values: dict[str, Any] | None) -> Policy:
    if values is None:
        return SOURCE_POLICY
    known = {one.name for one in fields(Policy)} - {"flavour", "class_weights"}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"no such switch: {', '.join(unknown)}")
    return replace(Policy(), **values)


def _outcome(workload: Workload) -> str:
    """A workload's outcome from its pods': what lives speaks for it, the most eventful first."""
    outcomes = {pod.outcome for pod in workload.pods}
    order = ("placed", "moved", "kept", "stuck", "preempted", "waiting", "gone")
    return next(outcome for outcome in order if outcome in outcomes)
