"""A recorded workload of gang jobs as a past to play: one pool of equal cards, a guarantee per department.

Times count in milliseconds from the beginning of the record. All work is interruptible and of one priority, and how
long a job runs is unknown to the scheduler, as in ``manage.py replay --jobs``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pool.engine.model import FlavourFacts, Gpu, Mix, Node, Policy, Request, TaskClass
from pool.engine.past import Piece, Run, Setting
from quotas.engine.tree import QuotaNode

FLAVOUR = "gpu"
JOB_COLUMNS = ("job_id", "submit_time", "duration", "gpu_num", "vc")
QUOTA_COLUMNS = ("vc", "nominal_gpus")
LONGEST_S = 10 * 366 * 86_400
MOST_CARDS = 1_000_000


class TraceError(ValueError):
    """A row that cannot be read: which (0: the head), and which column."""

    def __init__(self, row: int, column: str) -> None:
        super().__init__(f"row {row}: {column}")
        self.row, self.column = row, column


@dataclass(frozen=True, slots=True)
class Trace:
    """``departments``: names by number, from 1; ``jobs``: names of the pieces by id."""

    pieces: tuple[Piece, ...]
    setting: Setting
    departments: dict[int, str]
    jobs: dict[int, str]

    @property
    def until(self) -> int:
        """The end of the window that is measured: just after the last job came."""
        return max((piece.arrives for piece in self.pieces), default=0) + 1


def trace_past(
    jobs: Sequence[Mapping[str, str]], quotas: Sequence[Mapping[str, str]], *, more_cards: int = 0
) -> Trace:
    """Read a record; TraceError for a row that makes no sense. ``more_cards``: beside the sum of the guarantees."""
    guarantees: dict[str, int] = {}
    for row, line in enumerate(quotas, 1):
        name = _text(line, "vc", row)
        if name in guarantees:
            raise TraceError(row, "vc")
        guarantees[name] = _whole(line, "nominal_gpus", row, MOST_CARDS)
    if not guarantees or not jobs:
        raise TraceError(0, "nominal_gpus" if not guarantees else "job_id")
    read = [
        (
            _ms(line, "submit_time", row),
            _text(line, "job_id", row),
            _ms(line, "duration", row),
            _whole(line, "gpu_num", row, MOST_CARDS, least=1),
            _text(line, "vc", row),
        )
        for row, line in enumerate(jobs, 1)
    ]
    if len({name for _at, name, *_rest in read}) < len(read):
        raise TraceError(0, "job_id")
    read.sort()
    names = sorted(set(guarantees) | {job[4] for job in read})
    number = {name: n for n, name in enumerate(names, 1)}
    pieces = tuple(
        Piece(
            Request(
                id=n,
                department_id=number[department],
                flavours=(FLAVOUR,),
                per_node=gpus,
                queued_at=at,
            ),
            at,
            duration,
        )
        for n, (at, _name, duration, gpus, department) in enumerate(read)
    )
    total = sum(guarantees.values()) + more_cards
    tree = (
        QuotaNode(0, guarantee=1000 * total),
        *(QuotaNode(number[name], 0, guarantee=1000 * guarantees.get(name, 0)) for name in names),
    )
    setting = Setting(
        nodes=(_room(total),),
        flavours=(FlavourFacts(FLAVOUR, 1),),
        quotas={FLAVOUR: tree},
        policy=Policy(),
        mix=Mix(((TaskClass(0, 1, 1000), 1),)),
    )
    return Trace(pieces, setting, dict(enumerate(names, 1)), {n: job[1] for n, job in enumerate(read)})


def _room(total: int) -> Node:
    return Node(1, "pool", 1, "pool", tuple(Gpu(index, index, FLAVOUR, 1) for index in range(total)))


def _text(line: Mapping[str, str], column: str, row: int) -> str:
    found = (line.get(column) or "").strip()
    if not found:
        raise TraceError(row, column)
    return found


def _whole(line: Mapping[str, str], column: str, row: int, most: int, least: int = 0) -> int:
    text = (line.get(column) or "").strip()
    if not text.isdecimal() or len(text) > 12 or not least <= int(text) <= most:
        raise TraceError(row, column)
    return int(text)


def _ms(line: Mapping[str, str], column: str, row: int) -> int:
    """Seconds, with decimals or without, as milliseconds."""
    text = (line.get(column) or "").strip()
    whole, _dot, part = text.partition(".")
    if not whole.isdecimal() or (part and not part.isdecimal()) or len(whole) > 12 or int(whole) > LONGEST_S:
        raise TraceError(row, column)
    return 1000 * int(whole) + int((part + "000")[:3])


def events(trace: Trace, runs: Iterable[Run]) -> list[tuple[int, str, str]]:
    """The runs as (ms, job, start | preempt | finish) in order of time, places freed before they are taken."""
    found: list[tuple[int, int, str, str]] = []
    for run in runs:
        job = trace.jobs[run.request_id]
        found.append((run.start, 3, job, "start"))
        if run.ending is not None:
            kind = "finish" if run.ending == "finish" else "preempt"
            found.append((run.end, 0 if kind == "finish" else 1, job, kind))
    return [(at, job, kind) for at, _order, job, kind in sorted(found)]
