"""Cases of cases_quota.json: what a queue may use, bookings, caps, the choice of a flavour."""

from __future__ import annotations

from collections.abc import Callable

from pool.engine.cases.common import (
    Case,
    Result,
    build_trees,
    pairs_of,
    scaled,
    scaled_or_none,
    unscaled,
)
from quotas.engine.available import admit, available, cap_checks, max_possible
from quotas.engine.flavours import FlavourPolicy, FlavourRoom, choose_flavour
from quotas.engine.tree import QuotaNode, QuotaTree


def _by_node(
    case: Case, value: Callable[[QuotaTree, str], int]
) -> dict[str, dict[str, dict[str, int | float]]]:
    answer: dict[str, dict[str, dict[str, int | float]]] = {}
    for (flavour, resource), tree in build_trees(case).items():
        for node_id in tree.nodes:
            name = str(node_id)
            answer.setdefault(name, {}).setdefault(flavour, {})[resource] = unscaled(value(tree, name))
    return answer


def run_available(case: Case) -> Result:
    trees = build_trees(case)
    probes = [
        all(
            (flavour, resource) in trees
            and admit(trees[flavour, resource], probe["queue"], scaled(amount), interruptible=True).fits
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


def run_rollup(case: Case) -> Result:
    trees = build_trees(case)
    for step in case["steps"]:
        for flavour, resource in pairs_of(step["usage"]):
            book = trees[flavour, resource].add if step["op"] == "add" else trees[flavour, resource].remove
            book(step["queue"], scaled(step["usage"][flavour][resource]))
    answer: dict[str, dict[str, dict[str, int | float]]] = {}
    for (flavour, resource), tree in trees.items():
        for node_id, counters in tree.counters.items():
            used = unscaled(counters.charged)
            answer.setdefault(str(node_id), {}).setdefault(flavour, {})[resource] = used
    return {"node_usage": answer}


def run_cap(case: Case) -> Result:
    tree = QuotaTree(
        QuotaNode(
            id=queue["id"],
            parent=queue.get("parent"),
            guarantee=scaled_or_none(queue.get("deserved")),
            hard_cap=scaled_or_none(queue.get("limit")),
            total=scaled(queue.get("allocated", 0)),
            total_noninterruptible=scaled(queue.get("allocated_nonpreemptible", 0)),
        )
        for queue in case["queues"]
    )
    ask = case["request"]
    checks = cap_checks(tree, ask["queue"], scaled(ask["gpus"]), interruptible=ask["preemptible"])
    blocking = next((check for check in checks if not check.holds), None)
    result: Result = {"fits": blocking is None}
    if blocking is not None:
        result["blocking"] = {
            "level": blocking.level,
            "rule": blocking.rule,
            "limit": unscaled(blocking.limit),
            "used": unscaled(blocking.used),
            "requested": unscaled(blocking.requested),
        }
    return result


def run_flavour_choice(case: Case) -> Result:
    rooms = [
        FlavourRoom(
            id=row["id"],
            nominal=scaled(row["nominal"]),
            used=scaled(row["used"]),
            borrowable=scaled(row.get("borrowable", 0)),
            evictable=scaled(row.get("evictable", 0)),
        )
        for row in case["flavours"]
    ]
    policy = FlavourPolicy(case["when_can_borrow"], case["when_can_preempt"], case["preference"])
    choice = choose_flavour(scaled(case["request"]), rooms, policy)
    return {"flavour": choice.flavour, "mode": choice.mode}
