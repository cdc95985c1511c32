"""Run one case of the case-file format (kinds, fields and units: the file's own schema) through the engines.

One module per family of kinds. A kind that has no engine answers ``result: null`` with the reason
``kind_not_supported``; one that cannot be read, ``case_malformed``.
"""

from __future__ import annotations

from collections.abc import Callable

from pool.engine.cases import cluster, contest, line, quota, shares
from pool.engine.cases.common import Case, Result

__all__ = ["Case", "run_case", "run_cases"]


def run_case(case: Case) -> Result:
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


def run_cases(cases: list[Case]) -> list[Result]:
    return [run_case(case) for case in cases]


_RUNNERS: dict[str, Callable[[Case], Result]] = {
    "available": quota.run_available,
    "rollup": quota.run_rollup,
    "cap": quota.run_cap,
    "flavour_choice": quota.run_flavour_choice,
    "division": shares.run_division,
    "borrow_share": shares.run_borrow_share,
    "admission_order": shares.run_admission_order,
    "level_fairshare": shares.run_level_fairshare,
    "decay": shares.run_decay,
    "backfill": line.run_backfill,
    "queueing": line.run_queueing,
    "partial": line.run_partial,
    "queue_level": contest.run_queue_level,
    "loop_guard": contest.run_loop_guard,
    "min_runtime": contest.run_min_runtime,
    "cluster": cluster.run_cluster,
}
