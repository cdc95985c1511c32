"""The preempt action: within a department the more important displaces the less important.

Who asks      a blocked request.
Who gives     interruptible work of the same department with strictly lower priority, never equal
              (``Policy.preempt_equal``: also equal work that started after the request was queued). Minimum run
              times protect.
Order         not begun yet, lowest priority, newest start, smallest. Where the department's own lower work is
              not enough, what it may claim from others (``reclaim``) counts too, before its own.
Source: BEHAVIOUR 5 (Preemption within a department); cases_preemption.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from pool.engine.fit import Need
from pool.engine.making_room import evictions, settle
from pool.engine.model import Request
from pool.engine.reclaim import Claim, for_each_kind
from pool.engine.round import Blocked, Round
from pool.engine.victims import Bench, Candidate, Search

RULE = "higher_priority_same_department"


def run(round_: Round, bench: Bench, *, withdraw: bool) -> None:
    """Make room for blocked requests within their departments, in line order."""
    if not round_.policy.preempt:
        return

    def may(request: Request, need: Need) -> bool:
        lowest = bench.lowest_priority(need.flavour or "", request.department_id)
        return lowest is not None and (lowest < request.priority or round_.policy.preempt_equal)

    for_each_kind(round_, lambda *asked: preempt(round_, bench, *asked, withdraw=withdraw), may=may)


def preempt(
    round_: Round, bench: Bench, blocked: Blocked, request: Request, need: Need, *, withdraw: bool
) -> bool:
    """Make room for one request; whether that was possible."""
    search = Search(round_, request, need)
    own = _Own(round_, bench, request, need, withdraw)
    found = search.find(own.line(spared=False))
    claim = own.claim() if found is None and round_.policy.reclaim else None
    if claim is not None:
        others = claim.line(bench, strict=True, withdraw=withdraw, spared=False)
        found = search.find(chain(others, own.line(spared=False)))
        if found is not None and own.claim(found.victims) is None:
            found = None
    if own.sees_spared:
        meant = search.find(own.line(spared=True))
        victims = [one for one in meant.victims if one.running and one.running.spared] if meant else []
        round_.spared += evictions(round_, victims, blocked.request, "preempt", RULE, own.figures)
    if found is None or not found.victims or len(found.victims) > round_.policy.max_victims:
        return False

    def figures(one: Candidate) -> dict[str, Any]:
        if claim is not None and one.department != request.department_id:
            return claim.figures(one)
        return own.figures(one)

    settle(round_, bench, blocked, found, "preempt", RULE, figures)
    return True


class _Own:
    """The department's own candidates for one request."""

    def __init__(self, round_: Round, bench: Bench, request: Request, need: Need, withdraw: bool) -> None:
        self.round, self.bench, self.request, self.need = round_, bench, request, need
        self.withdraw, self.sees_spared = withdraw, False
        self.tree = round_.world.trees.get(need.flavour or "")

    def line(self, *, spared: bool) -> Iterator[Candidate]:
        flavour, department = self.need.flavour or "", self.request.department_id
        for one in self.bench.unbegun(flavour, department) if self.withdraw else ():
            if one.priority < self.request.priority:
                yield one
        for one in self.bench.of(flavour, department):
            running = one.running
            assert running is not None
            if not self._less_important(running.priority, running.started_at):
                continue
            if self.bench.minimum.protects(running, self.request.department_id, self.tree, reclaim=False):
                continue
            if running.spared and not spared:
                self.sees_spared = True
                continue
            yield one

    def claim(self, leaving: Sequence[Candidate] | None = None) -> Claim | None:
        """What the request may take back from others once its department's own lower work (or of some victims,
        its own part) is gone."""
        candidates = self.line(spared=False) if leaving is None else leaving
        mine = [one for one in candidates if one.department == self.request.department_id]
        with self.round.world.what_if():
            for one in mine:
                one.release(self.round.world)
            return Claim.of(self.round, self.request, self.need)

    def _less_important(self, priority: int, started_at: int) -> bool:
        if priority < self.request.priority:
            return True
        equal = self.round.policy.preempt_equal and priority == self.request.priority
        return equal and started_at > self.request.queued_at

    def figures(self, one: Candidate) -> dict[str, Any]:
        priority = one.running.priority if one.running is not None else 0
        return {
            "flavour": self.need.flavour,
            "requested": self.need.charge_milli,
            "freed": one.charge,
            "department": self.request.department_id,
            "priority": self.request.priority,
            "victim_priority": priority,
        }
