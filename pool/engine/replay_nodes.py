"""Replay of a workload trace: tasks arrive one after the other on an empty pool and are placed once and for good.

No queue, no departures, no second try: what does not fit when it arrives is turned away. Each task goes through the
same ``find_among`` and scores as a request of the product. The workload mix comes from a history of tasks, or is
learnt from the arrivals as they come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pool.engine.fit import Need
from pool.engine.fleet import Fleet
from pool.engine.mix import mix_of, with_prior
from pool.engine.model import Gpu, Member, Mix, Node, Request, TaskClass
from pool.engine.placement import find_among
from pool.engine.state import PoolState

CARD_MIB = 1000
"""The trace knows no GPU memory: a fraction takes as much of it as of the card."""
RELEARN_AFTER = 64
RELEARN_GROWTH = 1.25
"""Without a history the mix is learnt anew whenever so many more tasks have arrived."""


class TraceError(ValueError):
    """A row of the trace cannot be read: which, and why."""


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a task list; ``models`` empty = any."""

    id: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    milli: int
    models: tuple[str, ...]

    @property
    def kind(self) -> TaskClass:
        return TaskClass(self.cpu_milli, self.gpus, self.milli, self.models)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a task went: the node's id in the trace and the indexes of its cards; node "" = turned away."""

    task_id: str
    node: str
    cards: tuple[int, ...]
    seconds: float


def read_nodes(rows: Iterable[Mapping[str, str]]) -> list[Node]:
    """Nodes of a trace with columns node_id, cpu_milli, memory_mib, gpu, model, in the order of the file."""
    nodes: list[Node] = []
    seen: set[str] = set()
    first = 0
    for line, row in enumerate(rows):
        name = _text(row, "node_id", line)
        if name in seen:
            raise TraceError(f"row {line + 2}: node {name} is there twice")
        seen.add(name)
        count, model = _number(row, "gpu", line), row.get("model") or ""
        gpus = tuple(Gpu(first + index, index, model, CARD_MIB) for index in range(count))
        first += count
        nodes.append(
            Node(
                line,
                name,
                1,
                "trace",
                gpus,
                _number(row, "cpu_milli", line),
                _number(row, "memory_mib", line),
            )
        )
    return nodes


def read_tasks(rows: Iterable[Mapping[str, str]]) -> list[Task]:
    """Tasks of a trace with columns task_id, cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec, in order of
    arrival (``seq`` where the column is there)."""
    tasks: list[tuple[int, Task]] = []
    for line, row in enumerate(rows):
        count = _number(row, "num_gpu", line)
        milli = _number(row, "gpu_milli", line) if count else 0
        if count and not 0 < milli <= 1000:
            raise TraceError(f"row {line + 2}: gpu_milli {milli} is not within 1 to 1000")
        models = (
            tuple(sorted({part for part in (row.get("gpu_spec") or "").split("|") if part})) if count else ()
        )
        task = Task(
            _text(row, "task_id", line), _number(row, "cpu_milli", line), _number(row, "memory_mib", line), count,
            milli, models,
        )  # fmt: skip
        tasks.append((_number(row, "seq", line) if row.get("seq") else line, task))
    tasks.sort(key=lambda one: one[0])
    return [task for _, task in tasks]


def history_mix(tasks: Iterable[Task]) -> Mix:
    """The workload mix of a list of past tasks."""
    return mix_of(Counter(task.kind for task in tasks))


def replay_nodes(
    nodes: Sequence[Node], tasks: Iterable[Task], history: Mix | None, clock: Callable[[], float]
) -> Iterator[Decision]:
    """Place the tasks in their order. ``clock`` (seconds) times each decision; it never influences one."""
    fleet = Fleet(nodes)
    state = PoolState(fleet, mix=history if history is not None else with_prior({}))
    state.prepare()
    asks: dict[tuple[TaskClass, int], Ask] = {}
    arrived: Counter[TaskClass] = Counter()
    total, relearn_at = 0, float(RELEARN_AFTER)
    for task in tasks:
        key = (task.kind, task.memory_mib)
        if key not in asks:
            asks[key] = ask_of(task, fleet.flavours)
        request, needs = asks[key]
        began = clock()
        found = find_among(state, state.view(None), request, needs)
        members = () if found is None else found.members
        for member in members:
            state.take(_as_told(member, task))
        elapsed = clock() - began
        yield _decision(fleet, task, members, elapsed)
        if history is None:
            arrived[task.kind] += 1
            total += 1
            if total >= relearn_at:
                relearn_at = total * RELEARN_GROWTH
                state.relearn(with_prior(arrived))


Ask = tuple[Request, list[Need]]


def ask_of(task: Task, models: Sequence[str]) -> Ask:
    """A task as a request of the product, with its need on each model that it may use."""
    fraction = 0 < task.milli < 1000
    flavours = (task.models or tuple(models)) if task.gpus else ()
    request = Request(
        id=0,
        department_id=0,
        flavours=flavours,
        shape="cpu" if not task.gpus else "fraction" if fraction else "whole",
        per_node=task.gpus,
        milli=task.milli if fraction else 0,
        cpu_milli=task.cpu_milli,
        memory_mib=task.memory_mib,
    )
    mib = CARD_MIB * task.milli // 1000 if fraction else 0
    needs = [Need(flavour, task.milli, mib, task.milli * task.gpus) for flavour in flavours]
    return request, needs or [Need(None, 0, 0, 0)]


def _as_told(member: Member, task: Task) -> Member:
    """A request that names no CPU or memory takes its share of the host; a task of a trace takes none."""
    if task.cpu_milli and task.memory_mib:
        return member
    return replace(member, cpu_milli=task.cpu_milli, memory_mib=task.memory_mib)


def _decision(fleet: Fleet, task: Task, members: tuple[Member, ...], seconds: float) -> Decision:
    if not members:
        return Decision(task.id, "", (), seconds)
    member = members[0]
    cards = tuple(sorted(fleet.cards[fleet.card_row[take.gpu_id]].index for take in member.takes))
    return Decision(task.id, fleet.nodes[fleet.node_row[member.node_id]].name, cards, seconds)


def _text(row: Mapping[str, str], column: str, line: int) -> str:
    value = row.get(column)
    if not value:
        raise TraceError(f"row {line + 2}: {column} is missing")
    return value


def _number(row: Mapping[str, str], column: str, line: int) -> int:
    value = (row.get(column) or "").strip()
    if not value.isdecimal():
        raise TraceError(f"row {line + 2}: {column} is not a whole number: {value[:40]!r}")
    return int(value)
