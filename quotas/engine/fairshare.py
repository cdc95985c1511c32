"""Fair shares: dividing capacity among departments, how much a department borrows, and how fast old use is
forgotten.

Exact arithmetic throughout (``Fraction``): with floats the odd unit flips between equal claims from cycle
to cycle.
Source: BEHAVIOUR 5 (Fair share), cases_fairshare.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from quotas.engine.available import max_possible
from quotas.engine.ids import NodeId, id_key
from quotas.engine.tree import QuotaTree

Number = int | Fraction


@dataclass(frozen=True, slots=True)
class Claim:
    """One department's claim on one resource.

    ``request`` = running + waiting demand; ``deserved`` = guarantee (None = unlimited); ``limit`` = hard cap
    (None = unlimited); ``priority`` = band that takes surplus first; ``created`` = age rank, 1 the oldest;
    ``usage`` = past use as a fraction of the capacity.
    """

    id: NodeId
    parent: NodeId | None
    request: Number
    deserved: Number | None = 0
    limit: Number | None = None
    weight: Number = 1
    priority: int = 0
    created: int = 0
    usage: Number = 0

    @property
    def demand(self) -> Number:
        """What it could use at most: min(limit, request)."""
        return self.request if self.limit is None else min(self.limit, self.request)


@dataclass(frozen=True, slots=True)
class Division:
    """``share`` per claim; ``remaining`` of the top level after all were served."""

    share: dict[NodeId, Number]
    remaining: Number


def divide(total: Number, claims: Iterable[Claim], *, k: Number = 0, unit: int = 1) -> Division:
    """Divide ``total`` among the top claims, and each share among its children, in three passes.

    (1) min(deserved, demand) for all, even past ``total``; (2) per priority band the surplus by weight in
    whole ``unit``s, remembering fractions; (3) what is left unit by unit to the largest fraction, then
    older, then smaller id, never past the demand. ``k`` is the strength of history.
    """
    by_parent: dict[NodeId | None, list[Claim]] = {}
    for claim in claims:
        by_parent.setdefault(claim.parent, []).append(claim)
    share: dict[NodeId, Number] = {}
    remaining = _divide_level(total, by_parent.get(None, []), share, k, unit)
    queue = list(by_parent.get(None, []))
    while queue:
        parent = queue.pop()
        below = by_parent.get(parent.id, [])
        _divide_level(share[parent.id], below, share, k, unit)
        queue.extend(below)
    return Division(share, remaining)


def _divide_level(
    total: Number, claims: Sequence[Claim], share: dict[NodeId, Number], k: Number, unit: int
) -> Number:
    left: Number = total
    for claim in claims:
        share[claim.id] = claim.demand if claim.deserved is None else min(claim.deserved, claim.demand)
        left -= share[claim.id]
    left = max(0, left)
    for band in sorted({claim.priority for claim in claims}, reverse=True):
        left = _surplus([claim for claim in claims if claim.priority == band], share, left, k, unit)
    return left


def _surplus(
    band: Sequence[Claim], share: dict[NodeId, Number], left: Number, k: Number, unit: int
) -> Number:
    # What a claim was not given of its part in the last round, times the sum of all portions then: who is still
    # hungry at the end had a part in every round, so all remainders have that denominator in common.
    remainders: dict[NodeId, Number] = {}
    again = True
    while again and left > 0:
        again = False
        hungry = [claim for claim in band if share[claim.id] < claim.demand]
        portions = _portions(hungry, k)
        whole = sum(portions.values())
        if whole == 0:
            break
        round_left = left
        for claim in hungry:
            part = round_left * portions[claim.id]
            rest = claim.demand - share[claim.id]
            if rest * whole <= part:
                again = again or rest * whole < part
                given: Number = rest
                remainders.pop(claim.id, None)
            else:
                given = unit * math.floor(part // (whole * unit))
                remainders[claim.id] = part - given * whole
            share[claim.id] += given
            left -= given
    order = sorted(
        (claim for claim in band if remainders.get(claim.id, 0) > 0),
        key=lambda claim: (-remainders[claim.id], claim.created, id_key(claim.id)),
    )
    for claim in order:
        given = min(unit, left, claim.demand - share[claim.id])
        share[claim.id] += given
        left -= given
    return left


def _portions(hungry: Sequence[Claim], k: Number) -> dict[NodeId, Number]:
    """What each claim's part of a round is in proportion to: its weight, more or less by its past use."""
    if k == 0:
        return {claim.id: claim.weight for claim in hungry}
    total_weight = Fraction(sum(Fraction(claim.weight) for claim in hungry))
    if total_weight == 0:
        return {claim.id: 0 for claim in hungry}
    portions: dict[NodeId, Number] = {}
    for claim in hungry:
        weight = Fraction(claim.weight) / total_weight
        portions[claim.id] = max(Fraction(0), weight + Fraction(k) * (weight - Fraction(claim.usage)))
    return portions


@dataclass(frozen=True, slots=True)
class BorrowShare:
    """Share of borrowed capacity of a node: ``value`` per mille rounded up, None = infinite (weight 0,
    borrowing).
    """

    value: int | None
    resource: str | None
    borrowing: bool


def borrow_share(
    trees: Mapping[str, Sequence[QuotaTree]],
    node_id: NodeId,
    *,
    weight: Number = 1,
    extra: Mapping[str, Sequence[int]] | None = None,
) -> BorrowShare:
    """``reach`` divided by the weight and rounded up, as shown to people. A root has 0."""
    best = reach(trees, node_id, extra=extra)
    if best is None:
        return BorrowShare(0, None, False)
    if weight == 0:
        return BorrowShare(None, best[1], True)
    return BorrowShare(math.ceil(best[0] / Fraction(weight)), best[1], True)


def reach(
    trees: Mapping[str, Sequence[QuotaTree]],
    node_id: NodeId,
    *,
    extra: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Fraction, str] | None:
    """How far a node reaches into what others own, per mille, and in which resource; None = it borrows
    nothing. ``trees`` and ``extra`` are by resource, one entry per flavour.

    Per resource: Σ flavours max(0, use + extra − subtree quota) ÷ Σ flavours (most the parent could use) ×
    1000; the largest over the resources. A root reaches nowhere.
    """
    best: tuple[Fraction, str] | None = None
    for resource in sorted(trees):
        over, possible = 0, 0
        for index, tree in enumerate(trees[resource]):
            parent = tree.nodes[node_id].parent
            if parent is None:
                return None
            more = extra[resource][index] if extra and resource in extra else 0
            over += max(0, tree.counters[node_id].charged + more - tree.subtree[node_id])
            possible += max_possible(tree, parent)
        if over > 0 and possible > 0:
            ratio = Fraction(over, possible) * 1000
            if best is None or ratio > best[0]:
                best = (ratio, resource)
    return best


def level_fairshare(siblings: Sequence[tuple[NodeId, Number, Number]]) -> dict[NodeId, Fraction | None]:
    """(id, shares, usage) of siblings → normalised shares ÷ normalised usage; None = infinite (no usage)."""
    shares = sum((Fraction(row[1]) for row in siblings), Fraction(0))
    usage = sum((Fraction(row[2]) for row in siblings), Fraction(0))
    answer: dict[NodeId, Fraction | None] = {}
    for node_id, own_shares, own_usage in siblings:
        if own_usage == 0 or usage == 0:
            answer[node_id] = None
        else:
            answer[node_id] = (Fraction(own_shares) / shares) / (Fraction(own_usage) / usage)
    return answer


def decayed_use(samples: Iterable[tuple[float, float]], half_life_hours: float) -> float:
    """Σ amount × 0.5^(age ÷ half-life) over (amount, hours ago); ``half_life_hours`` > 0."""
    return math.fsum(amount * 0.5 ** (age / half_life_hours) for amount, age in samples)
