"""What a placement costs the pool: the loss of usefulness of what is left free.

For each kind of node and each class of work, in nano-GPU (integers, so that sums are exact and the same on any
machine):

    cost = 30 · ΔP + ΔU + ordering terms                                  Δ = before − after

P, pattern value   Σ over cards of v(free share), v from ``price``: what the share is still good for. In effect it
                   decides alone; the rest orders what it leaves equal.
U, usable capacity Σ over the classes of the mix of frequency · min(free share on cards where the class fits,
                   c · what the node's free CPU could feed); 0 where the class does not fit. Frequencies are those
                   among the classes that a card model accepts. c = 1.93 · (1 − the part of all CPU that goes to work
                   without cards): what such work will take feeds no card.
ordering terms     0.04 per 8 free GPUs and 0.01 per 128 free vCPU left: fuller nodes first. Latency-sensitive work
                   spreads instead: it pays for busy cards and nodes. Whole cards pay for crossing link groups.

U is the fragmentation measure of Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with
Fragmentation Gradient Descent" (USENIX ATC 2023), capped by host CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pool.engine.fleet import AMPLE, Bools, Fleet, Floats, Ints
from pool.engine.kinds import (
    MILLI_MASK,
    MILLI_SHIFT,
    Kind,
    Kinds,
    MigCard,
    group_of,
    grown,
    mib_of,
    milli_of,
    sort_of,
)
from pool.engine.mix import PRIOR, cpu_without_cards, main_classes, tied_demand
from pool.engine.model import Mix
from pool.engine.price import CARD, UNIT, price_table

PATTERN = 30
CPU_FEEDS = 1.93
"""How far free CPU is counted on to feed free cards, where no work is without cards. Found on the openb trace, whose
work without cards has 22 % of all CPU (so 1.5 there), and borne out by mixes with far more and far less of it."""
LEAST_CAP = 0.5
PER_FREE_MILLI = UNIT * 4 // 100 // 8 // CARD
PER_FREE_CPU = UNIT // 100 // 128 // 1000
LINK = 5 * UNIT
BUSY_CARD = 2 * UNIT // CARD
BUSY_NODE = UNIT
OPENED_MIG_CARD = UNIT
FREE_MIG_SLICE = UNIT // 100
CPU, MEMORY, FULL, MOST, ORDER, FREE, NODE_CPU, CARDS, VALUE, CLASSES = range(10)
LIMITS = 4
"""The first columns of a kind's facts: free CPU, free memory, cards wholly free, the largest free share."""
_MISSING = -1e18
_FEW = 48
_FREQUENCY = UNIT // CARD
"""Frequencies are in this many parts: times a share in milli they give nano-GPU."""
_NO_CAP = 1e9
_UNKNOWN = float(AMPLE // 2)
_INF = float("inf")


@dataclass(frozen=True, slots=True)
class Work:
    """All of a request that a kind of node is judged by: equal works cost the same everywhere.

    ``count`` cards, fractions of ``milli`` and ``mib`` or slices of ``profile`` on one node; ``cpu`` and ``memory``
    0 = the node's share by whole cards, never blocking. ``flavours``: cards that it may be put on.
    """

    flavours: frozenset[str]
    shape: str
    count: int
    milli: int = 0
    mib: int = 0
    profile: str = ""
    cpu: int = 0
    memory: int = 0
    min_gpu_mib: int = 0
    spread: bool = False


class Scorer:
    """Scores over one fleet under one workload mix: all kinds with their value, all works with their costs."""

    def __init__(self, fleet: Fleet, mix: Mix | None = None) -> None:
        self.fleet = fleet
        self.kinds = Kinds(fleet)
        self.mix = mix if mix is not None and mix.classes else PRIOR
        demand: Counter[int] = Counter()
        for one, count in self.mix.classes:
            if one.per_node:
                demand[one.milli] += one.per_node * count
        self.demand_milli = max(1, sum(size * count for size, count in demand.items()))
        self.tied = tied_demand(self.mix, fleet.flavours)
        """Sets of flavours that work is tied to, with its milli-GPU out of ``demand_milli``."""
        self.cpu_cap = max(LEAST_CAP, CPU_FEEDS * (1 - cpu_without_cards(self.mix)))
        self.prices: Floats = price_table(demand).astype(float)
        self._weigh(self.mix)
        self.works: dict[Hashable, Any] = {}
        """Works of requests of one sort; kept by ``placement``."""
        self.linked = any(gpu.link_group != fleet.cards[0].link_group for gpu in fleet.cards)
        self.facts: Floats = np.zeros((0, CLASSES + len(self._cpu)))
        """One line per kind: columns as named above, then the milli usable for each class of the mix."""
        self._loss: dict[int, Floats] = {}
        self._costs: dict[Work, Costs] = {}

    def _weigh(self, mix: Mix) -> None:
        """The classes of the mix as arrays, those of one card first, and how frequent each is on each flavour."""
        merged: dict[tuple[int, float, int], list[int]] = {}
        number = {flavour: index for index, flavour in enumerate(self.fleet.flavours)}
        for one, times in main_classes(mix):
            # Several fractions of one request are judged one by one, each with its part of the CPU.
            several = one.per_node if one.milli < CARD else 1
            key = (one.per_node // several, one.cpu_milli / several, one.milli)
            row = merged.setdefault(key, [0] * (len(number) + 1))
            for flavour, index in number.items():
                if not one.flavours or flavour in one.flavours:
                    row[index] += times * several
        keys = sorted(merged)
        count = np.array([key[0] for key in keys], dtype=float)
        cpu = np.array([key[1] for key in keys], dtype=float)
        milli = np.array([key[2] for key in keys], dtype=float)
        counts = np.array([merged[key] for key in keys], dtype=float).reshape(len(keys), len(number) + 1)
        self.weight: Floats = np.rint(counts / np.maximum(counts.sum(axis=0), 1) * _FREQUENCY).T.copy()
        """[flavour, class]: frequency in parts of ``_FREQUENCY`` among the classes that may use the flavour."""
        self._cpu: Floats = cpu
        self._fed: Floats = np.where(cpu > 0, self.cpu_cap * milli * count / np.where(cpu > 0, cpu, 1.0), 0.0)
        self._unfed: Floats = np.where(cpu > 0, 0.0, _NO_CAP)
        self._some_unfed = bool((cpu == 0).any())
        self._cards_free: Floats = np.where(count > 1, count, 0.0)
        """Cards that must be wholly free for a class of several cards to be usable at all."""
        shares = np.arange(CARD + 1, dtype=float)[:, None]
        self.usable_of: Floats = np.where(shares >= np.where(count > 1, CARD, milli), shares, 0.0)
        """[share, class]: what of a share is usable for the class."""

    def settle(self) -> None:
        """Judge the kinds met since the last call."""
        start, met = self.kinds.settle()
        if not met:
            return
        if len(self.facts) < len(self.kinds.flavour):
            self.facts = grown(self.facts, len(self.kinds.flavour))
        end = start + len(met)
        facts = self.facts[start:end]
        facts[:, :VALUE] = [_sums(kind) for kind in met]
        usable: Floats = self.usable_of.take(milli_of(self.kinds.codes[start:end]), axis=0).sum(axis=1)
        facts[:, CLASSES:] = usable
        facts[:, VALUE] = self.usefulness(
            usable, facts[:, FULL], facts[:, CPU], self.kinds.flavour[start:end]
        )

    def usefulness(self, usable: Floats, full: Floats, cpu: Floats, flavour: Ints) -> Floats:
        """U of some node states, one per line."""
        cpu = cpu[:, None]
        capped: Floats = self._fed * cpu
        np.floor(capped, out=capped)
        if self._some_unfed:
            capped += self._unfed
        np.minimum(capped, usable, out=capped)
        fits = cpu >= self._cpu
        fits &= full[:, None] >= self._cards_free
        capped *= fits
        value: Floats = np.einsum("ij,ij->i", capped, self.weight.take(flavour, axis=0))
        return value

    def fraction_loss(self, milli: int) -> Floats:
        """[share before, class]: change of the usable part of a card when ``milli`` of it is taken."""
        found = self._loss.get(milli)
        if found is None:
            found = self._loss[milli] = np.zeros_like(self.usable_of)
            found[milli:] = self.usable_of[: CARD + 1 - milli] - self.usable_of[milli:]
        return found

    def costs(self, work: Work) -> Costs:
        """The costs of a work on all kinds; kept for the life of the scorer."""
        found = self._costs.get(work)
        if found is None:
            found = self._costs[work] = Costs(self, work)
        return found


def _sums(kind: Kind) -> tuple[float, ...]:
    """The first columns of a kind's facts."""
    milli = [card >> MILLI_SHIFT & MILLI_MASK for card in kind.codes]
    free = sum(milli)
    order = PER_FREE_MILLI * free + (PER_FREE_CPU * kind.cpu if kind.cpu < _UNKNOWN else 0)
    return (
        kind.cpu, kind.memory, milli.count(CARD), max(milli, default=0), order, free, kind.node_cpu, kind.cards,
    )  # fmt: skip


class Costs:
    """What one work costs on each kind (infinite where it does not fit), worked out when first needed."""

    def __init__(self, scorer: Scorer, work: Work) -> None:
        self.scorer, self.work = scorer, work
        self.allowed: list[bool] = [
            sort > 0 and flavour in work.flavours and memory >= work.min_gpu_mib
            for sort, (flavour, memory) in enumerate(scorer.fleet.sorts)
        ]
        """Which sorts of cards the work may be put on."""
        self._allowed: Bools = np.array(self.allowed)
        self._anywhere = work.shape == "cpu" or not scorer.kinds.uniform or bool(self._allowed[1:].all())
        whole, fraction = work.shape == "whole", work.shape == "fraction"
        self._least: Floats = np.array(
            [work.cpu, work.memory, work.count if whole else 0, work.milli if fraction else 0], dtype=float
        )
        self._cost: Floats = np.zeros(0)
        self._card: Ints = np.zeros(0, dtype=np.int64)

    def over(self, kinds: Ints) -> Floats:
        """The cost on each of these kinds."""
        scorer = self.scorer
        scorer.settle()
        if len(self._cost) < len(scorer.facts):
            known = len(self._cost)
            self._cost, self._card = (
                grown(self._cost, len(scorer.facts)),
                grown(self._card, len(scorer.facts)),
            )
            self._cost[known:] = _MISSING
        costs: Floats = self._cost.take(kinds)
        missing = kinds[costs == _MISSING]
        if len(missing):
            self._work_out(np.unique(missing) if len(missing) > _FEW else missing)
            costs = self._cost.take(kinds)
        return costs

    def places(self, kinds: Ints) -> Ints:
        """How many cards, fractions (one a card) or slices each of these kinds has free for the work, host aside."""
        found, back = np.unique(kinds, return_inverse=True)
        work, known = self.work, self.scorer.kinds
        if work.shape == "mig":
            free = [
                sum(
                    card.profiles.count(work.profile)
                    for card in known.mig.get(kind, ())
                    if card.flavour in work.flavours
                )
                for kind in found.tolist()
            ]
            return np.array(free, dtype=np.int64)[back]
        codes = known.codes.take(found, axis=0)
        fits = self._allowed.take(sort_of(codes)) & (milli_of(codes) >= max(1, work.milli))
        if work.shape == "fraction":
            fits &= mib_of(codes) >= work.mib
        places: Ints = fits.sum(axis=1).take(back)
        return places

    def card_on(self, kind: int) -> int:
        """The free milli of the card that a single fraction takes on a kind where it fits."""
        return int(self._card[kind])

    def _work_out(self, ids: Ints) -> None:
        self._cost[ids] = _INF
        work, scorer = self.work, self.scorer
        if work.shape == "mig":
            for kind in ids.tolist():
                self._cost[kind] = self._mig_cost(scorer.kinds.mig.get(kind, ()))
            return
        facts = scorer.facts.take(ids, axis=0)
        able = (facts[:, :LIMITS] >= self._least).all(axis=1)
        if not self._anywhere:
            able &= self._allowed.take(scorer.kinds.sort.take(ids))
        ids, facts = ids[able], facts[able]
        if not len(ids):
            return
        if work.shape == "cpu" or (work.shape == "whole" and scorer.kinds.uniform and not scorer.linked):
            self._whole(ids, facts)
            return
        codes = scorer.kinds.codes.take(ids, axis=0)
        milli = milli_of(codes)
        fits = milli >= work.milli
        if not scorer.kinds.uniform:
            fits &= self._allowed.take(sort_of(codes))
        if work.shape == "fraction":
            fits &= mib_of(codes) >= work.mib
        if work.shape == "fraction" and work.count == 1:
            self._one_fraction(ids, facts, milli, fits)
            return
        able = fits.sum(axis=1) >= work.count
        ids, facts, codes, milli, fits = ids[able], facts[able], codes[able], milli[able], fits[able]
        if work.shape == "fraction":
            self._fractions(ids, facts, milli, fits)
        else:
            self._whole(ids, facts)
            if scorer.linked and work.count > 1:
                self._cost[ids] += LINK * self._crosses_links(group_of(codes), fits)

    def _price(self, ids: Ints, facts: Floats, lost: Floats | float, taken: int) -> Floats:
        """The cost of leaving kinds as ``facts`` say now: ``lost`` of the pattern value and ``taken`` milli gone.

        Columns of what is usable and wholly free are as they are afterwards, the others as before.
        """
        scorer, work = self.scorer, self.work
        cpu = facts[:, CPU]
        if work.cpu:
            cpu = cpu - work.cpu
        elif work.shape == "whole":
            part = np.minimum(work.count, facts[:, CARDS])
            share = np.floor(facts[:, NODE_CPU] * part / np.maximum(1.0, facts[:, CARDS]))
            cpu = np.maximum(0.0, cpu - share)
        flavour = scorer.kinds.flavour.take(ids)
        cost: Floats = facts[:, VALUE] - scorer.usefulness(facts[:, CLASSES:], facts[:, FULL], cpu, flavour)
        if work.spread:
            cost += PATTERN * lost
            cost += np.rint(BUSY_NODE * (1 - facts[:, FREE] / np.maximum(1.0, CARD * facts[:, CARDS])))
        else:
            cost += facts[:, ORDER]
            cost += PATTERN * lost - float(PER_FREE_MILLI * taken + PER_FREE_CPU * work.cpu)
        return cost

    def _whole(self, ids: Ints, facts: Floats) -> None:
        """Whole cards, or none: which of the free ones makes no difference but for the links between them."""
        count = self.work.count
        if count:
            facts[:, CLASSES:] -= float(CARD * count)
            facts[:, FULL] -= count
        self._cost[ids] = self._price(ids, facts, count * float(self.scorer.prices[CARD]), CARD * count)

    def _crosses_links(self, group: Ints, fits: Bools) -> Bools:
        """Whether the cards that a node gives cannot be of one link group."""
        most = np.zeros(len(fits), dtype=np.int64)
        for number in np.unique(group[fits]):
            np.maximum(most, (fits & (group == number)).sum(axis=1), out=most)
        return most < self.work.count

    def _one_fraction(self, ids: Ints, facts: Floats, milli: Ints, fits: Bools) -> None:
        scorer, work = self.scorer, self.work
        # Cards are sorted: a card like the one before it needs no look of its own.
        fits[:, 1:] &= ~(fits[:, :-1] & (milli[:, 1:] == milli[:, :-1]))
        line, place = fits.nonzero()
        if not len(line):
            return
        before = milli[line, place]
        facts, lines = facts.take(line, axis=0), ids.take(line)
        facts[:, CLASSES:] += scorer.fraction_loss(work.milli).take(before, axis=0)
        facts[:, FULL] -= before == CARD
        cost = self._price(
            lines, facts, scorer.prices.take(before) - scorer.prices.take(before - work.milli), work.milli
        )
        if work.spread:
            cost += BUSY_CARD * (CARD - before)
        # Of equal ones the card with the least free, then the first.
        order = np.lexsort((before, cost, line))
        ordered = line.take(order)
        best = order[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
        where = lines.take(best)
        self._cost[where] = cost.take(best)
        self._card[where] = before.take(best)

    def _fractions(self, ids: Ints, facts: Floats, milli: Ints, fits: Bools) -> None:
        """Several fractions of one request on different cards: each the card that loses least by itself."""
        scorer, work = self.scorer, self.work
        rank = np.where(fits, fraction_rank(scorer.prices, milli, work), _INF)
        chosen = np.argsort(rank, axis=1, kind="stable")[:, : work.count]
        before = np.take_along_axis(milli, chosen, axis=1)
        facts[:, CLASSES:] += scorer.fraction_loss(work.milli)[before].sum(axis=1)
        facts[:, FULL] -= (before == CARD).sum(axis=1)
        lost = (scorer.prices[before] - scorer.prices[before - work.milli]).sum(axis=1)
        cost = self._price(ids, facts, lost, work.milli * work.count)
        if work.spread:
            cost += BUSY_CARD * (CARD - before).sum(axis=1)
        self._cost[ids] = cost

    def _mig_cost(self, cards: Iterable[MigCard]) -> float:
        """Slices: split cards that are in use already before drained ones, the fullest first."""
        work = self.work
        cost, left = 0, work.count
        usable = [card for card in cards if card.flavour in work.flavours and work.profile in card.profiles]
        for card in sorted(usable, key=lambda card: mig_rank(card.untouched, card.profiles, work.profile)):
            if left == 0:
                break
            taken = min(left, card.profiles.count(work.profile))
            left -= taken
            cost += OPENED_MIG_CARD if card.untouched else 0
        if left:
            return _INF
        free = sum(card.profiles.count(work.profile) for card in usable) - work.count
        return float(cost + FREE_MIG_SLICE * free)


def fraction_rank(prices: Floats, milli: Ints, work: Work) -> Floats:
    """The order in which cards take the fractions of one request: least loss of pattern value, then least free."""
    after = np.maximum(milli - work.milli, 0)
    lost: Floats = (prices[milli] - prices[after]) * (2 * CARD) + milli
    return lost + 4.0 * UNIT * (CARD - milli) if work.spread else lost


def mig_rank(untouched: bool, profiles: tuple[str, ...], profile: str) -> tuple[bool, int, int]:
    """The order in which split cards give slices: those in use first, the fewest of the profile, the fewest free."""
    return untouched, profiles.count(profile), len(profiles)
