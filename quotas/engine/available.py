"""What a department may still start, and which level says no.

Availability follows the borrowing formula (see ``tree``); caps and the non-interruptible rule look at the
totals:
    admitted  ⇔  total + r ≤ cap on every ancestor
             and r ≤ available(leaf)
             and, for work that may not be interrupted, total_noninterruptible + r ≤ guarantee on every
             ancestor
Source: BEHAVIOUR 4 and 5 (Admission), cases_quota.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quotas.engine.ids import NodeId
from quotas.engine.tree import QuotaTree

Rule = Literal["hard_cap", "guarantee", "borrow_limit", "subtree_quota"]


class LevelCheck(NamedTuple):
    """One rule at one level: ``used + requested ≤ limit``. ``requested`` is the part that reaches the
    level.
    """

    level: NodeId
    rule: Rule
    limit: int
    used: int
    requested: int

    @property
    def holds(self) -> bool:
        return self.used + self.requested <= self.limit

    @property
    def missing(self) -> int:
        """By how much the level is short; 0 where the rule holds."""
        return max(0, self.used + self.requested - self.limit)


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to one ask: ``blocking`` is the first level, leaf first, whose rule fails; ``checks`` are
    all.
    """

    fits: bool
    blocking: LevelCheck | None
    checks: tuple[LevelCheck, ...]
    available: int
    borrowed: int

    def as_blocking(self) -> dict[str, NodeId | int | str] | None:
        """``{level, rule, limit, used, requested}`` of what blocks, or None."""
        if self.blocking is None:
            return None
        check = self.blocking
        return {
            "level": check.level,
            "rule": check.rule,
            "limit": check.limit,
            "used": check.used,
            "requested": check.requested,
        }


def available_raw(tree: QuotaTree, node_id: NodeId) -> int:
    """Availability by the formula; below 0 where an ancestor is over its quota (then nothing may start)."""
    path = tree.path(node_id)
    root = path[-1]
    answer = tree.subtree[root] - tree.counters[root].charged
    for step in path[-2::-1]:
        kept, used, limit = tree.kept[step], tree.counters[step].charged, tree.nodes[step].borrow_limit
        if limit is not None:
            answer = min(answer, tree.subtree[step] - kept - max(0, used - kept) + limit)
        if kept > used:
            answer += kept - used
    return answer


def available(tree: QuotaTree, node_id: NodeId) -> int:
    """What the node may still use by guarantee, borrowing and lending; never below 0, caps not counted."""
    return max(0, available_raw(tree, node_id))


def max_possible(tree: QuotaTree, node_id: NodeId) -> int:
    """What the node could use at most if nothing were used anywhere, caps not counted."""
    path = tree.path(node_id)
    answer = tree.subtree[path[-1]]
    for step in reversed(path[:-1]):
        kept, limit = tree.kept[step], tree.nodes[step].borrow_limit
        if limit is not None:
            answer = min(answer, tree.subtree[step] - kept + limit)
        answer += kept
    return answer


def cap_checks(tree: QuotaTree, node_id: NodeId, amount: int, *, interruptible: bool) -> list[LevelCheck]:
    """Hard caps, and for non-interruptible work the guarantees, on the node and every ancestor, leaf
    first.
    """
    checks: list[LevelCheck] = []
    path = tree.path(node_id)
    for step in path:
        cap = tree.nodes[step].hard_cap
        if cap is not None:
            checks.append(LevelCheck(step, "hard_cap", cap, tree.counters[step].total, amount))
    if not interruptible:
        for step in path:
            node = tree.nodes[step]
            if node.own is None and node.guarantee is None:
                continue
            used = tree.counters[step].total_noninterruptible
            checks.append(LevelCheck(step, "guarantee", tree.guarantee(step), used, amount))
    return checks


def borrow_checks(tree: QuotaTree, node_id: NodeId, amount: int) -> list[LevelCheck]:
    """The availability formula unrolled by level: every check holds exactly when ``amount`` ≤
    ``available_raw``.

    ``requested`` falls on the way up by what a level still keeps for itself, and may fall below 0 there.
    """
    checks: list[LevelCheck] = []
    path = tree.path(node_id)
    rising = amount
    for step in path[:-1]:
        kept, used, limit = tree.kept[step], tree.counters[step].charged, tree.nodes[step].borrow_limit
        if limit is not None:
            checks.append(LevelCheck(step, "borrow_limit", tree.subtree[step] + limit, used, rising))
        rising -= max(0, kept - used)
    root = path[-1]
    checks.append(LevelCheck(root, "subtree_quota", tree.subtree[root], tree.counters[root].charged, rising))
    return checks


def admit(tree: QuotaTree, node_id: NodeId, amount: int, *, interruptible: bool) -> Admission:
    """Judge one ask of ``amount`` ≥ 0 by all rules; nothing is booked. TreeError for an unknown node."""
    checks = cap_checks(tree, node_id, amount, interruptible=interruptible)
    checks.extend(borrow_checks(tree, node_id, amount))
    blocking = next((check for check in checks if not check.holds), None) if amount > 0 else None
    return Admission(
        fits=blocking is None,
        blocking=blocking,
        checks=tuple(checks),
        available=headroom(tree, node_id, interruptible=interruptible),
        borrowed=borrowed(tree, node_id, amount),
    )


def refusal(tree: QuotaTree, node_id: NodeId, amount: int, *, interruptible: bool) -> LevelCheck | None:
    """The first level whose rule an ask of ``amount`` > 0 breaks, as ``admit`` names it, without the rest."""
    path = tree.path(node_id)
    for step in path:
        cap = tree.nodes[step].hard_cap
        if cap is not None and tree.counters[step].total + amount > cap:
            return LevelCheck(step, "hard_cap", cap, tree.counters[step].total, amount)
    if not interruptible:
        for step in path:
            node, used = tree.nodes[step], tree.counters[step].total_noninterruptible
            if (node.own is not None or node.guarantee is not None) and used + amount > tree.guarantee(step):
                return LevelCheck(step, "guarantee", tree.guarantee(step), used, amount)
    rising = amount
    for step in path[:-1]:
        kept, used, limit = tree.kept[step], tree.counters[step].charged, tree.nodes[step].borrow_limit
        if limit is not None and used + rising > tree.subtree[step] + limit:
            return LevelCheck(step, "borrow_limit", tree.subtree[step] + limit, used, rising)
        rising -= max(0, kept - used)
    root = path[-1]
    used = tree.counters[root].charged
    if used + rising > tree.subtree[root]:
        return LevelCheck(root, "subtree_quota", tree.subtree[root], used, rising)
    return None


def headroom(tree: QuotaTree, node_id: NodeId, *, interruptible: bool) -> int:
    """The largest amount that ``admit`` would let pass now; never below 0. The fast half of ``admit``."""
    answer = available_raw(tree, node_id)
    nodes, of = tree.nodes, tree.counters
    for step in tree.path(node_id):
        node = nodes[step]
        if node.hard_cap is not None and node.hard_cap - of[step].total < answer:
            answer = node.hard_cap - of[step].total
        if not interruptible and (node.own is not None or node.guarantee is not None):
            room = tree.guarantee(step) - of[step].total_noninterruptible
            if room < answer:
                answer = room
    return answer if answer > 0 else 0


def borrowed(tree: QuotaTree, node_id: NodeId, amount: int = 0) -> int:
    """How much of the node's use, with ``amount`` more, lies above its guarantee."""
    return max(0, tree.counters[node_id].total + amount - tree.guarantee(node_id))


def over_by(tree: QuotaTree, node_id: NodeId) -> int:
    """By how much the node is over its hard cap, or over what its quota and borrowing allow, after limits
    fell.
    """
    node, counters = tree.nodes[node_id], tree.counters[node_id]
    over = [-available_raw(tree, node_id)]
    if node.hard_cap is not None:
        over.append(counters.total - node.hard_cap)
    return max(0, *over)


def sum_conflicts(tree: QuotaTree) -> Iterable[LevelCheck]:
    """Levels whose children's guarantees sum past their own: refused on a change unless overridden."""
    for node_id in tree.post_order:
        if tree.own[node_id] < 0:
            below = sum(tree.guarantee(child) for child in tree.children[node_id])
            yield LevelCheck(node_id, "guarantee", tree.guarantee(node_id), 0, below)
