"""The workload mix: what kinds of work come to this pool, and how often. Placement keeps room for it.

Given by history (``Snapshot.mix``), or taken from what runs and waits now. While little is known a plain prior
counts as well, so that the first placements of a new pool are sensible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pool.engine.fit import flavour_refusal, need_of
from pool.engine.model import FlavourFacts, Mix, Request, Running, TaskClass

COVERED_PERMILLE = 980
"""The most frequent classes that make up this part of all work are looked at; the rest is rare."""
FULL_WEIGHT = 200
"""With this many tasks known the prior does not count any more."""

PRIOR = Mix(
    (
        (TaskClass(0, 1, 1000), 8),
        (TaskClass(0, 2, 1000), 3),
        (TaskClass(0, 4, 1000), 2),
        (TaskClass(0, 8, 1000), 3),
        (TaskClass(0, 1, 500), 2),
        (TaskClass(0, 1, 250), 2),
    )
)
"""Work of a pool that nothing is known of: mostly whole cards, powers of two of them, some halves and quarters."""


def learn(requests: Iterable[Request], running: Iterable[Running], facts: Mapping[str, FlavourFacts]) -> Mix:
    """The mix of what waits and runs, with the prior while that is little.

    What runs is not known to be tied to its flavour, so only what waits says which models are asked for.
    """
    counts: Counter[TaskClass] = Counter()
    alike: dict[tuple[object, ...], TaskClass | None] = {}
    for request in requests:
        key = (
            request.shape, request.per_node, request.milli, request.share_mib, request.cpu_milli, request.flavours,
            request.min_gpu_mib, request.fp8, request.nvlink,
        )  # fmt: skip
        if key not in alike:
            alike[key] = class_of(request, facts)
        one = alike[key]
        if one is not None:
            counts[one] += request.nodes
    for allocation in running:
        for member in allocation.members:
            takes = [take for take in member.takes if take.slice_id is None]
            if takes:
                counts[TaskClass(member.cpu_milli, len(takes), max(1, takes[0].charge_milli))] += 1
    return with_prior(counts)


def with_prior(counts: Mapping[TaskClass, int]) -> Mix:
    """Counts as a mix; below ``FULL_WEIGHT`` tasks the prior fills up what is missing."""
    total = sum(counts.values())
    if total >= FULL_WEIGHT:
        return mix_of(counts)
    weighed = {one: count * FULL_WEIGHT for one, count in counts.items()}
    prior = sum(count for _, count in PRIOR.classes)
    for one, count in PRIOR.classes:
        weighed[one] = weighed.get(one, 0) + count * (FULL_WEIGHT - total) * FULL_WEIGHT // prior
    return mix_of(weighed)


def mix_of(counts: Mapping[TaskClass, int]) -> Mix:
    """Counts as a mix, in a fixed order."""
    return Mix(tuple(sorted(counts.items(), key=lambda row: (-row[1], _order(row[0])))))


def class_of(request: Request, facts: Mapping[str, FlavourFacts]) -> TaskClass | None:
    """The class of a request: what one node of it takes. None for what asks for slices or fits no flavour."""
    if request.shape == "mig":
        return None
    if request.shape == "cpu":
        return TaskClass(request.cpu_milli, 0, 0)
    usable = [code for code in request.flavours if flavour_refusal(request, facts.get(code)) is None]
    need = need_of(request, facts[usable[0]]) if usable else None
    if need is None:
        return None
    tied = () if len(usable) == len(facts) else tuple(sorted(usable))
    return TaskClass(request.cpu_milli, request.per_node, max(1, need.milli), tied)


def main_classes(mix: Mix) -> list[tuple[TaskClass, int]]:
    """The most frequent classes that cover nearly all work, those with cards."""
    total = sum(count for _, count in mix.classes)
    kept: list[tuple[TaskClass, int]] = []
    covered = 0
    for one, count in sorted(mix.classes, key=lambda row: (-row[1], _order(row[0]))):
        if covered * 1000 >= COVERED_PERMILLE * total:
            break
        covered += count
        if one.per_node:
            kept.append((one, count))
    return kept


def cpu_without_cards(mix: Mix) -> float:
    """The part of the CPU asked for that goes to work without cards; 0 where nobody names any."""
    without = sum(one.cpu_milli * count for one, count in mix.classes if not one.per_node)
    return without / max(1, sum(one.cpu_milli * count for one, count in mix.classes))


def tied_demand(mix: Mix, flavours: Iterable[str], most: int = 32) -> list[tuple[tuple[str, ...], int]]:
    """Which sets of flavours work is tied to, with its milli-GPU, the largest first; at most ``most`` sets."""
    known = set(flavours)
    tied: Counter[tuple[str, ...]] = Counter()
    for one, count in mix.classes:
        usable = tuple(sorted(known.intersection(one.flavours)))
        if one.per_node and usable and len(usable) < len(known):
            tied[usable] += one.per_node * one.milli * count
    return sorted(tied.items(), key=lambda row: (-row[1], row[0]))[:most]


def _order(one: TaskClass) -> tuple[int, int, int, tuple[str, ...]]:
    return one.cpu_milli, one.per_node, one.milli, one.flavours
