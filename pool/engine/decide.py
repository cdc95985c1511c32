"""``decide(snapshot, policy, now) → Plan``: who starts where, who is promised what, and why everyone else
waits.

Pure and deterministic: the order of the snapshot's tuples does not matter, ties go by id. Actions so far:
allocate with backfill behind the promises to the first blocked requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from pool.engine.allocate import Blocked, Cycle
from pool.engine.backfill import BASIS_LEASE_ENDS, BASIS_WINDOW, estimate_from
from pool.engine.fit import flavour_refusal, need_of
from pool.engine.model import Plan, Policy, Request, Snapshot, Waiting
from pool.engine.order import Line, fair_shares

AHEAD_TOLD = 5


def decide(snapshot: Snapshot, policy: Policy, now: int) -> Plan:
    """The plan for one moment. Every pending request is in ``places`` or in ``waiting``, never in both."""
    cycle = Cycle(snapshot, policy, now)
    pending = sorted(snapshot.pending, key=lambda request: request.id)
    shares = fair_shares(cycle.trees, pending, _capacity(snapshot), lambda r, f: _charge(cycle, r, f))
    for request in Line(pending, cycle.trees, shares):
        cycle.run(request)
    reserves = (*cycle.reserves, *cycle.windows)
    return Plan(tuple(cycle.places), reserves, tuple(_waiting(cycle.blocked, policy, now)))


def _charge(cycle: Cycle, request: Request, flavour: str) -> int:
    facts = cycle.facts.get(flavour)
    if flavour_refusal(request, facts) is not None:
        return 0
    need = need_of(request, facts)
    return need.charge_milli if need else 0


def _capacity(snapshot: Snapshot) -> Mapping[str, int]:
    capacity: dict[str, int] = {}
    for node in snapshot.nodes:
        for gpu in node.gpus:
            if gpu.blocked is None and node.blocked is None:
                capacity[gpu.flavour] = capacity.get(gpu.flavour, 0) + 1000
    return capacity


def _waiting(blocked: list[Blocked], policy: Policy, now: int) -> list[Waiting]:
    lines: dict[str | None, list[int]] = {}
    for one in blocked:
        lines.setdefault(_line_of(one.request), []).append(one.request.id)
    answer: list[Waiting] = []
    seen: dict[str | None, int] = {}
    for one in blocked:
        key = _line_of(one.request)
        line, before = lines[key], seen.get(key, 0)
        seen[key] = before + 1
        basis = BASIS_WINDOW if one.reason.code == "not_before" else BASIS_LEASE_ENDS
        estimate = (
            estimate_from(one.reserve.start_at, now, policy, basis) if one.reserve is not None else None
        )
        answer.append(
            Waiting(
                request_id=one.request.id,
                code=one.reason.code,
                figures=one.reason.figures,
                flavour=one.reason.flavour,
                position=before + 1,
                of=len(line),
                ahead=tuple(line[max(0, before - AHEAD_TOLD) : before]),
                estimate=estimate,
                reserved=one.reserve,
            )
        )
    return answer


def _line_of(request: Request) -> str | None:
    return next(iter(request.flavours), None)
