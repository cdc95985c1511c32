"""Cases of cases_preemption.json that need no machines: who gives way, minimum run times, settling."""

from __future__ import annotations

from typing import Any

from pool.engine.cases.common import Case, Result, build_trees, fraction, pairs_of, scaled
from quotas.engine.contest import BOTH, Field, Job, Rules, minimum_run, settle, victims


def run_queue_level(case: Case) -> Result:
    contended = [(flavour, resource) for flavour, resource in case.get("contended") or []]
    found = victims(
        _field(case),
        _job(case["incoming"]),
        case["mode"],
        contended=contended,
        strategies=tuple(case.get("strategies") or BOTH),
    )
    return {"victims": [{"id": victim.job.id, "reason": victim.why} for victim in found]}


def run_loop_guard(case: Case) -> Result:
    evictions, settled = settle(_field(case), _job(case["incoming"]), case["mode"])
    return {"evictions": evictions, "settled": settled}


def run_min_runtime(case: Case) -> Result:
    name = case["field"]
    seconds = minimum_run(
        {queue["id"]: queue.get("parent") for queue in case["queues"]},
        {queue["id"]: queue.get(name) for queue in case["queues"]},
        case["preemptor_queue"],
        case["victim_queue"],
        case.get("default", 0),
        reclaim=name == "reclaim_min_runtime",
    )
    return {"seconds": seconds, "protected": case["victim_runtime"] < seconds}


def _field(case: Case) -> Field:
    nodes = [*case.get("cohorts", []), *case["queues"]]
    field = Field(
        trees=build_trees(case),
        rules={queue["id"]: _rules(queue.get("preemption") or {}) for queue in case["queues"]},
        weights={node["id"]: fraction(node.get("weight", 1)) for node in nodes},
    )
    for row in case["running"]:
        field.admit(_job(row))
    return field


def _rules(row: dict[str, Any]) -> Rules:
    borrow = row.get("borrow_within_cohort") or {}
    return Rules(
        within_queue=row.get("within_queue", "Never"),
        reclaim_within_cohort=row.get("reclaim_within_cohort", "Never"),
        borrow_within_cohort=borrow.get("policy", "Never"),
        borrow_max_priority=borrow.get("max_priority"),
    )


def _job(row: dict[str, Any]) -> Job:
    return Job(
        id=row["id"],
        queue=row["queue"],
        usage={pair: scaled(row["usage"][pair[0]][pair[1]]) for pair in pairs_of(row["usage"])},
        priority=row.get("priority", 0),
        admitted_at=row.get("admitted_at") or 0,
        created_at=row.get("created_at") or 0,
        ending=bool(row.get("evicted")),
    )
