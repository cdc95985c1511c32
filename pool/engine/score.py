"""What a placement costs the pool: the loss of usefulness of what is left free.

For each kind of node and each class of work, in nano-GPU (integers, so that sums are exact and the same on any
machine):

    cost = 30 · ΔP + ΔU + ordering terms                                  Δ = before − after

P, pattern value   Σ over cards of v(free share), v from ``price``: what the share is still good for. In effect it
                   decides alone; the rest orders what it leaves equal.
U, usable capacity Σ over the classes of the mix of frequency · min(free share on cards where the class fits,
                   1.5 · what the node's free CPU could feed); 0 where the class does not fit. Frequencies are those
                   among the classes that a card model accepts.
ordering terms     0.04 per 8 free GPUs and 0.01 per 128 free vCPU left: fuller nodes first. Latency-sensitive work
                   spreads instead: it pays for busy cards and nodes. Whole cards pay for crossing link groups.

U is the fragmentation measure of Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with
Fragmentation Gradient Descent" (USENIX ATC 2023), capped by host CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pool.engine.fleet import AMPLE, Bools, Fleet, Floats, Ints
from pool.engine.kinds import Kinds, MigCard, grown
from pool.engine.mix import PRIOR, main_classes, tied_demand
from pool.engine.model import Mix
from pool.engine.price import CARD, UNIT, price_table

PATTERN = 30
CPU_CAP = 1.5
PER_FREE_MILLI = UNIT * 4 // 100 // 8 // CARD
PER_FREE_CPU = UNIT // 100 // 128 // 1000
LINK = 5 * UNIT
BUSY_CARD = 2 * UNIT // CARD
BUSY_NODE = UNIT // 2
OPENED_MIG_CARD = UNIT
FREE_MIG_SLICE = UNIT // 100
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
        self.prices: Floats = price_table(demand).astype(float)
        self._weigh(self.mix)
        self._linked = any(gpu.link_group != fleet.cards[0].link_group for gpu in fleet.cards)
        self.fitting: Floats = np.zeros((0, len(self.sizes)))
        self.usable: Floats = np.zeros((0, len(self.sizes)))
        self.pattern: Floats = np.zeros(0)
        self.free: Floats = np.zeros(0)
        self.value: Floats = np.zeros(0)
        self._costs: dict[Work, Costs] = {}

    def _weigh(self, mix: Mix) -> None:
        """The classes of the mix as arrays, and how frequent each is on each flavour."""
        merged: dict[tuple[int, int, int], list[int]] = {}
        number = {flavour: index for index, flavour in enumerate(self.fleet.flavours)}
        for one, count in main_classes(mix):
            row = merged.setdefault((one.cpu_milli, one.per_node, one.milli), [0] * (len(number) + 1))
            for flavour, index in number.items():
                if not one.flavours or flavour in one.flavours:
                    row[index] += count
        keys = sorted(merged)
        self.class_cpu: Floats = np.array([key[0] for key in keys], dtype=float)
        self.class_count: Floats = np.array([key[1] for key in keys], dtype=float)
        milli = np.array([key[2] for key in keys], dtype=float)
        self.sizes: Floats = np.unique(milli)
        self.class_size: Ints = np.searchsorted(self.sizes, milli)
        counts = np.array([merged[key] for key in keys], dtype=float).reshape(len(keys), len(number) + 1)
        total = np.maximum(counts.sum(axis=0), 1)
        self.weight: Floats = np.rint(counts / total * _FREQUENCY).T.copy()
        """[flavour, class]: frequency in parts of ``_FREQUENCY`` among the classes that may use the flavour."""
        asks_cpu = self.class_cpu > 0
        self._fed: Floats = np.where(
            asks_cpu, CPU_CAP * milli * self.class_count / np.where(asks_cpu, self.class_cpu, 1.0), 0.0
        )
        self._unfed: Floats = np.where(asks_cpu, 0.0, _NO_CAP)
        shares = np.arange(CARD + 1, dtype=float)
        self._fits_of: Floats = (shares[:, None] >= self.sizes[None, :]).astype(float)
        self._usable_of: Floats = self._fits_of * shares[:, None]

    def settle(self) -> None:
        """Value the kinds met since the last call."""
        fresh = self.kinds.settle()
        if not fresh:
            return
        if len(self.value) < len(self.kinds.cpu):
            for name in ("fitting", "usable", "pattern", "free", "value"):
                setattr(self, name, grown(getattr(self, name), len(self.kinds.cpu)))
        lines = slice(fresh.start, fresh.stop)
        milli = self.kinds.milli[lines].astype(np.int64)
        self.fitting[lines] = self._fits_of[milli].sum(axis=1)
        self.usable[lines] = self._usable_of[milli].sum(axis=1)
        self.pattern[lines] = self.prices[milli].sum(axis=1)
        self.free[lines] = milli.sum(axis=1)
        self.value[lines] = self._value(
            self.fitting[lines], self.usable[lines], self.pattern[lines], self.kinds.cpu[lines],
            self.kinds.flavour[lines],
        )  # fmt: skip

    def _value(self, fitting: Floats, usable: Floats, pattern: Floats, cpu: Floats, flavour: Ints) -> Floats:
        """30 · P + U of some node states, one per line."""
        cpu = cpu[:, None]
        capped: Floats = np.floor(self._fed * cpu)
        capped += self._unfed
        np.minimum(capped, usable[:, self.class_size], out=capped)
        capped *= (fitting[:, self.class_size] >= self.class_count) & (cpu >= self.class_cpu)
        capped *= self.weight[flavour]
        value: Floats = PATTERN * pattern + capped.sum(axis=1)
        return value

    def costs(self, work: Work) -> Costs:
        """The costs of a work on all kinds; kept for the life of the scorer."""
        found = self._costs.get(work)
        if found is None:
            found = self._costs[work] = Costs(self, work)
        return found

    def allowed_sorts(self, work: Work) -> Bools:
        """Which sorts of cards a work may be put on."""
        return np.array(
            [
                sort > 0 and flavour in work.flavours and memory >= work.min_gpu_mib
                for sort, (flavour, memory) in enumerate(self.fleet.sorts)
            ]
        )

    def crosses_links(self, fits: Bools, group: npt.NDArray[np.int32], count: int) -> Bools:
        """Whether ``count`` fitting cards of a node cannot be of one link group."""
        if not self._linked or count < 2:
            return np.zeros(len(fits), dtype=bool)
        best = np.zeros(len(fits), dtype=np.int64)
        for number in np.unique(group[fits]):
            np.maximum(best, (fits & (group == number)).sum(axis=1), out=best)
        return best < count


class Costs:
    """What one work costs on each kind (infinite where it does not fit), worked out when first needed."""

    def __init__(self, scorer: Scorer, work: Work) -> None:
        self.scorer, self.work = scorer, work
        self._allowed = scorer.allowed_sorts(work)
        self._cost: Floats = np.full(0, -1.0)
        self._card: npt.NDArray[np.int16] = np.zeros(0, dtype=np.int16)

    def over(self, kinds: Ints) -> Floats:
        """The cost on each of these kinds."""
        scorer = self.scorer
        scorer.settle()
        if len(self._cost) < len(scorer.value):
            known = len(self._cost)
            self._cost, self._card = (
                grown(self._cost, len(scorer.value)),
                grown(self._card, len(scorer.value)),
            )
            self._cost[known:] = -1.0
        costs: Floats = self._cost.take(kinds)
        missing = costs < 0
        if missing.any():
            self._work_out(np.unique(kinds[missing]))
            costs = self._cost.take(kinds)
        return costs

    def card_on(self, kind: int) -> int:
        """The free milli of the card that a single fraction takes on a kind where it fits."""
        return int(self._card[kind])

    def _work_out(self, ids: Ints) -> None:
        self._cost[ids] = _INF
        if self.work.shape == "mig":
            for kind in ids.tolist():
                self._cost[kind] = self._mig_cost(self.scorer.kinds.mig.get(kind, ()))
            return
        kinds, work = self.scorer.kinds, self.work
        fits = self._fits(ids)
        able = (
            (fits.sum(axis=1) >= work.count)
            & (kinds.cpu[ids] >= work.cpu)
            & (kinds.memory[ids] >= work.memory)
        )
        if not able.any():
            return
        ids, fits = ids[able], fits[able]
        if work.shape == "fraction" and work.count == 1:
            self._one_fraction(ids, fits)
        elif work.shape == "fraction":
            self._fractions(ids, fits)
        else:
            self._whole(ids, fits)

    def _fits(self, ids: Ints) -> Bools:
        """Which cards of the kinds have room for one card or fraction of the work."""
        kinds, work = self.scorer.kinds, self.work
        fits = self._allowed[kinds.sort[ids]] & (kinds.milli[ids] >= max(1, work.milli))
        if work.shape == "fraction":
            fits &= kinds.mib[ids] >= work.mib
        return fits

    def _cpu_left(self, ids: Ints) -> Floats:
        """Host CPU left on each kind: after what was asked, or after the node's share by whole cards."""
        kinds, work = self.scorer.kinds, self.work
        free = kinds.cpu[ids]
        if work.cpu:
            return free - work.cpu
        if work.shape != "whole":
            return free
        part = np.minimum(work.count, kinds.cards[ids])
        return np.maximum(
            0.0, free - np.floor(kinds.total_cpu[ids] * part / np.maximum(1.0, kinds.cards[ids]))
        )

    def _price(
        self, ids: Ints, fitting: Floats, usable: Floats, pattern: Floats, cpu: Floats, taken: float
    ) -> Floats:
        """The cost of leaving kinds in the state given by the other arguments, ``taken`` milli taken."""
        scorer, kinds = self.scorer, self.scorer.kinds
        cost = scorer.value[ids] - scorer._value(fitting, usable, pattern, cpu, kinds.flavour[ids])
        free, size = scorer.free[ids], np.maximum(1.0, CARD * kinds.cards[ids])
        if self.work.spread:
            cost += np.rint(BUSY_NODE * (1 - free / size))
        else:
            cost += PER_FREE_MILLI * (free - taken)
            cost += PER_FREE_CPU * np.where(cpu < _UNKNOWN, cpu, 0.0)
        return cost

    def _whole(self, ids: Ints, fits: Bools) -> None:
        scorer, work = self.scorer, self.work
        count = work.count if work.shape == "whole" else 0
        cost = self._price(
            ids,
            scorer.fitting[ids] - count * scorer._fits_of[CARD],
            scorer.usable[ids] - count * scorer._usable_of[CARD],
            scorer.pattern[ids] - count * scorer.prices[CARD],
            self._cpu_left(ids),
            CARD * count,
        )
        cost += LINK * scorer.crosses_links(fits, scorer.kinds.group[ids], count)
        self._cost[ids] = cost

    def _one_fraction(self, ids: Ints, fits: Bools) -> None:
        scorer, work = self.scorer, self.work
        milli = scorer.kinds.milli[ids].astype(np.int64)
        # Cards are sorted: a card like the one before it needs no look of its own.
        fits[:, 1:] &= ~(fits[:, :-1] & (milli[:, 1:] == milli[:, :-1]))
        line, place = np.nonzero(fits)
        before = milli[line, place]
        after, lines = before - work.milli, ids[line]
        cost = self._price(
            lines,
            scorer.fitting[lines] - scorer._fits_of[before] + scorer._fits_of[after],
            scorer.usable[lines] - scorer._usable_of[before] + scorer._usable_of[after],
            scorer.pattern[lines] - scorer.prices[before] + scorer.prices[after],
            self._cpu_left(lines),
            work.milli,
        )
        if work.spread:
            cost += BUSY_CARD * (CARD - before)
        order = np.lexsort((before, cost, line))
        first = np.flatnonzero(np.diff(line[order], prepend=-1))
        best = order[first]
        self._cost[ids] = cost[best]
        self._card[ids] = before[best]

    def _fractions(self, ids: Ints, fits: Bools) -> None:
        """Several fractions of one request on different cards: each the card that loses least by itself."""
        scorer, work = self.scorer, self.work
        milli = scorer.kinds.milli[ids].astype(np.int64)
        rank = np.where(fits, fraction_rank(scorer.prices, milli, work), _INF)
        chosen = np.argsort(rank, axis=1, kind="stable")[:, : work.count]
        before = np.take_along_axis(milli, chosen, axis=1)
        after = before - work.milli
        fitting, usable = scorer.fitting[ids], scorer.usable[ids]
        cost = self._price(
            ids,
            fitting + (scorer._fits_of[after] - scorer._fits_of[before]).sum(axis=1),
            usable + (scorer._usable_of[after] - scorer._usable_of[before]).sum(axis=1),
            scorer.pattern[ids] + (scorer.prices[after] - scorer.prices[before]).sum(axis=1),
            self._cpu_left(ids),
            work.milli * work.count,
        )
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


def fraction_rank(prices: Floats, milli: npt.NDArray[np.int64], work: Work) -> Floats:
    """The order in which cards take the fractions of one request: least loss of pattern value, then least free."""
    after = np.maximum(milli - work.milli, 0)
    lost: Floats = (prices[milli] - prices[after]) * (2 * CARD) + milli
    return lost + 4.0 * UNIT * (CARD - milli) if work.spread else lost


def mig_rank(untouched: bool, profiles: tuple[str, ...], profile: str) -> tuple[bool, int, int]:
    """The order in which split cards give slices: those in use first, the fewest of the profile, the fewest free."""
    return untouched, profiles.count(profile), len(profiles)
