"""Cases of one pool without nodes: backfill behind promises, strict or best-effort queues, partial starts."""

from __future__ import annotations

from typing import Any

from pool.engine.cases.common import Case, Result
from pool.engine.decide import decide
from pool.engine.fit import partial_count
from pool.engine.model import (
    WHOLE,
    FlavourFacts,
    Gpu,
    Member,
    Node,
    Plan,
    Policy,
    Request,
    Running,
    Snapshot,
    Take,
)


def _line(case: Case, busy: list[dict[str, Any]], total: int, policy: Policy) -> tuple[Plan, dict[int, str]]:
    """One node of ``total`` cards, ``busy`` work on the first ones, the case's pending jobs by one
    decision.
    """
    now = int(case.get("now", 0))
    cards = tuple(Gpu(index, index, "gpu", 1) for index in range(total))
    running, first = [], 0
    for number, job in enumerate(busy):
        takes = tuple(Take(first + index, (WHOLE,), 1000, 0) for index in range(job["gpus"]))
        member = Member(0, 1, 0, 0, takes)
        running.append(
            Running(number, -1 - number, 1, "gpu", 1000 * job["gpus"], (member,), ends_at=job.get("end"))
        )
        first += job["gpus"]
    pending = tuple(
        Request(
            id=number,
            department_id=1,
            flavours=("gpu",),
            per_node=job["gpus"],
            priority=job.get("priority", 0),
            queued_at=job.get("submitted", 0),
            duration_ms=job.get("limit"),
        )
        for number, job in enumerate(case["pending"])
    )
    snapshot = Snapshot(
        nodes=(Node(1, "pool", 1, "pool", cards),),
        flavours=(FlavourFacts("gpu", 1),),
        running=tuple(running),
        pending=pending,
    )
    return decide(snapshot, policy, now), {number: job["id"] for number, job in enumerate(case["pending"])}


def run_backfill(case: Case) -> Result:
    policies = {
        "fifo_strict": Policy(max_reservations=1, queueing="strict", overdue_ms=0),
        "easy": Policy(max_reservations=1, overdue_ms=0),
        "conservative": Policy(max_reservations=len(case["pending"]), overdue_ms=0),
    }
    plan, names = _line(case, case["running"], case["gpus"], policies[case["policy"]])
    start: dict[str, int | None] = dict.fromkeys(names.values())
    start |= {names[place.request_id]: int(case.get("now", 0)) for place in plan.places}
    start |= {names[reserve.request_id]: reserve.start_at for reserve in plan.reserves}
    return {"start": start}


def run_queueing(case: Case) -> Result:
    biggest = max((job["gpus"] for job in case["pending"]), default=0)
    held = max(0, biggest - case["free"])
    policy = Policy(max_reservations=0, queueing=case["strategy"])
    plan, names = _line(case, [{"gpus": held}], case["free"] + held, policy)
    return {"admitted": [names[place.request_id] for place in plan.places]}


def run_partial(case: Case) -> Result:
    count = partial_count(case["count"], case.get("min_count"), case["gpus_each"], case["free"])
    return {"admitted_count": count}
