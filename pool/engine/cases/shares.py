"""Cases of cases_fairshare.json: divisions, shares of what is borrowed, the order of admission, decay."""

from __future__ import annotations

from typing import Any

from pool.engine.cases.common import (
    Case,
    Result,
    build_trees,
    fraction,
    fraction_or_none,
    pairs_of,
    plain,
    scaled,
)
from quotas.engine.fairshare import Claim, borrow_share, decayed_use, divide, level_fairshare
from quotas.engine.tournament import Head, admission_pass
from quotas.engine.tree import QuotaTree


def run_division(case: Case) -> Result:
    claims = [
        Claim(
            id=row["id"],
            parent=row.get("parent"),
            request=fraction(row["request"]),
            deserved=fraction_or_none(row.get("deserved", 0)),
            limit=fraction_or_none(row.get("limit")),
            weight=fraction(row.get("weight", 1)),
            priority=row.get("priority", 0),
            created=row.get("created", 0),
            usage=fraction(row.get("usage") or 0),
        )
        for row in case["queues"]
    ]
    division = divide(fraction(case["total"]), claims, k=fraction(case.get("k") or 0))
    share = {str(node_id): plain(value) for node_id, value in division.share.items()}
    return {"share": share, "remaining": plain(division.remaining)}


def run_borrow_share(case: Case) -> Result:
    trees = build_trees(case)
    by_resource: dict[str, list[QuotaTree]] = {}
    for (_, resource), tree in trees.items():
        by_resource.setdefault(resource, []).append(tree)
    wanted = case.get("extra_request") or {}
    share: dict[str, Any] = {}
    for node in [*case.get("cohorts", []), *case.get("queues", [])]:
        extra: dict[str, list[int]] = {}
        for (flavour, resource), tree in trees.items():
            more = scaled((wanted.get(flavour) or {}).get(resource, 0))
            extra.setdefault(resource, []).append(more if tree.subtree[node["id"]] > 0 else 0)
        weight = fraction(node.get("weight", 1))
        found = borrow_share(by_resource, node["id"], weight=weight, extra=extra)
        share[node["id"]] = {
            "value": "infinite" if found.value is None else found.value,
            "resource": found.resource,
            "borrowing": found.borrowing,
        }
    return {"share": share}


def run_admission_order(case: Case) -> Result:
    trees = build_trees(case)
    weights = {
        node["id"]: fraction(node.get("weight", 1))
        for node in [*case.get("cohorts", []), *case.get("queues", [])]
    }
    heads = [
        Head(
            id=job["id"],
            queue=job["queue"],
            usage={pair: scaled(job["usage"][pair[0]][pair[1]]) for pair in pairs_of(job["usage"])},
            priority=job.get("priority", 0),
            created_at=job.get("created_at", 0),
        )
        for job in case["pending"]
    ]
    done = admission_pass(trees, weights, heads)
    return {"admitted": list(done.admitted), "waiting": list(done.waiting)}


def run_level_fairshare(case: Case) -> Result:
    answer: dict[str, Any] = {}
    for group in case["siblings"]:
        rows = [(row["id"], fraction(row["shares"]), fraction(row["usage"])) for row in group]
        for node_id, value in level_fairshare(rows).items():
            answer[str(node_id)] = "infinite" if value is None else float(value)
    return {"level_fs": answer}


def run_decay(case: Case) -> Result:
    samples = [(row["gpu_hours"], row["hours_ago"]) for row in case["samples"]]
    return {"usage": decayed_use(samples, case["half_life_hours"])}
