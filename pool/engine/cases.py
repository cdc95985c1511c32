"""Run one case of the case-file format (kinds, fields and units: the file's own schema) through the engines.

Numbers of a case may be decimals: they are scaled to integers (1/1000) or taken as exact fractions, and
come back as plain JSON numbers. A kind that has no engine yet answers ``result: null`` with the reason
``kind_not_supported``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

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
from quotas.engine.available import admit, available, cap_checks, max_possible
from quotas.engine.fairshare import Claim, borrow_share, decayed_use, divide, level_fairshare
from quotas.engine.flavours import FlavourPolicy, FlavourRoom, choose_flavour
from quotas.engine.tournament import Head, admission_pass
from quotas.engine.tree import QuotaNode, QuotaTree

Case = dict[str, Any]
SCALE = 1000


def run_case(case: Case) -> dict[str, Any]:
    """``{"id", "result", "reasons"}`` of one case; ``result`` is None with a reason where it cannot be
    judged.
    """
    runner = _RUNNERS.get(case.get("kind", ""))
    if runner is None:
        return {"id": case.get("id"), "result": None, "reasons": ["kind_not_supported"]}
    try:
        return {"id": case["id"], "result": runner(case), "reasons": []}
    except (KeyError, TypeError, ValueError) as error:
        return {"id": case.get("id"), "result": None, "reasons": [f"case_malformed: {error}"]}


def run_cases(cases: list[Case]) -> list[dict[str, Any]]:
    return [run_case(case) for case in cases]


def _scaled(value: Any) -> int:
    number = Fraction(str(value)) * SCALE
    if number.denominator != 1:
        raise ValueError(f"{value!r} is finer than 1/{SCALE}")
    return number.numerator


def _scaled_or_none(value: Any) -> int | None:
    return None if value is None else _scaled(value)


def _plain(value: int | Fraction) -> int | float:
    number = Fraction(value)
    return number.numerator if number.denominator == 1 else float(number)


def _unscaled(value: int) -> int | float:
    return _plain(Fraction(value, SCALE))


def _pairs(case: Case) -> list[tuple[str, str]]:
    """All (flavour, resource) pairs that the case's quotas, usage or probes name, in order."""
    found: set[tuple[str, str]] = set()
    for node in [*case.get("cohorts", []), *case.get("queues", [])]:
        found.update(_pairs_of(node.get("quotas") or {}))
    for usage in (case.get("usage") or {}).values():
        found.update(_pairs_of(usage))
    return sorted(found)


def _pairs_of(amounts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for flavour, resources in amounts.items():
        for resource in resources:
            yield flavour, resource


def build_trees(case: Case) -> dict[tuple[str, str], QuotaTree]:
    """One tree per (flavour, resource) of the case, with its start usage booked."""
    trees: dict[tuple[str, str], QuotaTree] = {}
    for flavour, resource in _pairs(case):
        nodes = []
        for node in [*case.get("cohorts", []), *case.get("queues", [])]:
            quota = ((node.get("quotas") or {}).get(flavour) or {}).get(resource) or {}
            nodes.append(
                QuotaNode(
                    id=node["id"],
                    parent=node.get("parent"),
                    own=_scaled(quota.get("nominal") or 0),
                    borrow_limit=_scaled_or_none(quota.get("borrowing_limit")),
                    lend_limit=_scaled_or_none(quota.get("lending_limit")),
                )
            )
        trees[flavour, resource] = QuotaTree(nodes)
    for queue, usage in (case.get("usage") or {}).items():
        for flavour, resource in _pairs_of(usage):
            trees[flavour, resource].add(queue, _scaled(usage[flavour][resource]))
    return trees


def _by_node(
    case: Case, value: Callable[[QuotaTree, str], int]
) -> dict[str, dict[str, dict[str, int | float]]]:
    answer: dict[str, dict[str, dict[str, int | float]]] = {}
    for (flavour, resource), tree in build_trees(case).items():
        for node_id in tree.nodes:
            name = str(node_id)
            answer.setdefault(name, {}).setdefault(flavour, {})[resource] = _unscaled(value(tree, name))
    return answer


def _available(case: Case) -> dict[str, Any]:
    trees = build_trees(case)
    probes = [
        all(
            (flavour, resource) in trees
            and admit(trees[flavour, resource], probe["queue"], _scaled(amount), interruptible=True).fits
            for flavour, resources in probe["request"].items()
            for resource, amount in resources.items()
        )
        for probe in case.get("probes", [])
    ]
    return {
        "available": _by_node(case, available),
        "max_possible": _by_node(case, max_possible),
        "node_capacity": _by_node(case, lambda tree, node_id: tree.subtree[node_id]),
        "probes": probes,
    }


def _rollup(case: Case) -> dict[str, Any]:
    trees = build_trees(case)
    for step in case["steps"]:
        for flavour, resource in _pairs_of(step["usage"]):
            book = trees[flavour, resource].add if step["op"] == "add" else trees[flavour, resource].remove
            book(step["queue"], _scaled(step["usage"][flavour][resource]))
    answer: dict[str, dict[str, dict[str, int | float]]] = {}
    for (flavour, resource), tree in trees.items():
        for node_id, counters in tree.counters.items():
            used = _unscaled(counters.charged)
            answer.setdefault(str(node_id), {}).setdefault(flavour, {})[resource] = used
    return {"node_usage": answer}


def _cap(case: Case) -> dict[str, Any]:
    tree = QuotaTree(
        QuotaNode(
            id=queue["id"],
            parent=queue.get("parent"),
            guarantee=_scaled_or_none(queue.get("deserved")),
            hard_cap=_scaled_or_none(queue.get("limit")),
            total=_scaled(queue.get("allocated", 0)),
            total_noninterruptible=_scaled(queue.get("allocated_nonpreemptible", 0)),
        )
        for queue in case["queues"]
    )
    ask = case["request"]
    checks = cap_checks(tree, ask["queue"], _scaled(ask["gpus"]), interruptible=ask["preemptible"])
    blocking = next((check for check in checks if not check.holds), None)
    result: dict[str, Any] = {"fits": blocking is None}
    if blocking is not None:
        result["blocking"] = {
            "level": blocking.level,
            "rule": blocking.rule,
            "limit": _unscaled(blocking.limit),
            "used": _unscaled(blocking.used),
            "requested": _unscaled(blocking.requested),
        }
    return result


def _flavour_choice(case: Case) -> dict[str, Any]:
    rooms = [
        FlavourRoom(
            id=row["id"],
            nominal=_scaled(row["nominal"]),
            used=_scaled(row["used"]),
            borrowable=_scaled(row.get("borrowable", 0)),
            evictable=_scaled(row.get("evictable", 0)),
        )
        for row in case["flavours"]
    ]
    policy = FlavourPolicy(case["when_can_borrow"], case["when_can_preempt"], case["preference"])
    choice = choose_flavour(_scaled(case["request"]), rooms, policy)
    return {"flavour": choice.flavour, "mode": choice.mode}


def _fraction(value: Any) -> int | Fraction:
    return value if isinstance(value, int) else Fraction(str(value))


def _fraction_or_none(value: Any) -> int | Fraction | None:
    return None if value is None else _fraction(value)


def _division(case: Case) -> dict[str, Any]:
    claims = [
        Claim(
            id=row["id"],
            parent=row.get("parent"),
            request=_fraction(row["request"]),
            deserved=_fraction_or_none(row.get("deserved", 0)),
            limit=_fraction_or_none(row.get("limit")),
            weight=_fraction(row.get("weight", 1)),
            priority=row.get("priority", 0),
            created=row.get("created", 0),
            usage=_fraction(row.get("usage") or 0),
        )
        for row in case["queues"]
    ]
    division = divide(_fraction(case["total"]), claims, k=_fraction(case.get("k") or 0))
    share = {str(node_id): _plain(value) for node_id, value in division.share.items()}
    return {"share": share, "remaining": _plain(division.remaining)}


def _borrow_share(case: Case) -> dict[str, Any]:
    trees = build_trees(case)
    by_resource: dict[str, list[QuotaTree]] = {}
    for (_, resource), tree in trees.items():
        by_resource.setdefault(resource, []).append(tree)
    wanted = case.get("extra_request") or {}
    share: dict[str, Any] = {}
    for node in [*case.get("cohorts", []), *case.get("queues", [])]:
        extra: dict[str, list[int]] = {}
        for (flavour, resource), tree in trees.items():
            more = _scaled((wanted.get(flavour) or {}).get(resource, 0))
            extra.setdefault(resource, []).append(more if tree.subtree[node["id"]] > 0 else 0)
        weight = _fraction(node.get("weight", 1))
        found = borrow_share(by_resource, node["id"], weight=weight, extra=extra)
        share[node["id"]] = {
            "value": "infinite" if found.value is None else found.value,
            "resource": found.resource,
            "borrowing": found.borrowing,
        }
    return {"share": share}


def _admission_order(case: Case) -> dict[str, Any]:
    trees = build_trees(case)
    weights = {
        node["id"]: _fraction(node.get("weight", 1))
        for node in [*case.get("cohorts", []), *case.get("queues", [])]
    }
    heads = [
        Head(
            id=job["id"],
            queue=job["queue"],
            usage={pair: _scaled(job["usage"][pair[0]][pair[1]]) for pair in _pairs_of(job["usage"])},
            priority=job.get("priority", 0),
            created_at=job.get("created_at", 0),
        )
        for job in case["pending"]
    ]
    done = admission_pass(trees, weights, heads)
    return {"admitted": list(done.admitted), "waiting": list(done.waiting)}


def _level_fairshare(case: Case) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for group in case["siblings"]:
        rows = [(row["id"], _fraction(row["shares"]), _fraction(row["usage"])) for row in group]
        for node_id, value in level_fairshare(rows).items():
            answer[str(node_id)] = "infinite" if value is None else float(value)
    return {"level_fs": answer}


def _decay(case: Case) -> dict[str, Any]:
    samples = [(row["gpu_hours"], row["hours_ago"]) for row in case["samples"]]
    return {"usage": decayed_use(samples, case["half_life_hours"])}


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


def _backfill(case: Case) -> dict[str, Any]:
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


def _queueing(case: Case) -> dict[str, Any]:
    biggest = max((job["gpus"] for job in case["pending"]), default=0)
    held = max(0, biggest - case["free"])
    policy = Policy(max_reservations=0, queueing=case["strategy"])
    plan, names = _line(case, [{"gpus": held}], case["free"] + held, policy)
    return {"admitted": [names[place.request_id] for place in plan.places]}


def _partial(case: Case) -> dict[str, Any]:
    count = partial_count(case["count"], case.get("min_count"), case["gpus_each"], case["free"])
    return {"admitted_count": count}


_RUNNERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "available": _available,
    "rollup": _rollup,
    "cap": _cap,
    "flavour_choice": _flavour_choice,
    "division": _division,
    "borrow_share": _borrow_share,
    "admission_order": _admission_order,
    "level_fairshare": _level_fairshare,
    "backfill": _backfill,
    "queueing": _queueing,
    "partial": _partial,
    "decay": _decay,
}
