"""New layouts for split cards that nobody uses, where a request finds no slice of its profile.

A layout is a set of instances with their places on the card. Of all layouts that hold what the request lacks, the one
is planned that strands the fewest compute slices, then serves most of what else is waited for, then strands least
memory, then changes least of what is there, then has the fewest instances. Only drained cards are split anew, and as
few as possible: instances in use cannot be moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

from pool.engine.fit import Need, gpu_refusal
from pool.engine.mig import Geometry, Placed
from pool.engine.model import Layout, Request
from pool.engine.placement import host_fits
from pool.engine.state import PoolState, View

Instances = tuple[Placed, ...]


@lru_cache(maxsize=64)
def full_layouts(table: Geometry) -> tuple[Instances, ...]:
    """One placement for each set of profiles that an empty card can carry and that takes no further instance."""
    found: dict[tuple[str, ...], Instances] = {}
    for placed in _fill(table, 0, ()):
        names = tuple(sorted(one.profile for one in placed))
        if names not in found and not any(table.free_starts(placed, one.name) for one in table.profiles):
            found[names] = placed
    return tuple(found[names] for names in sorted(found))


def _fill(table: Geometry, slot: int, placed: Instances) -> Iterator[Instances]:
    """All ways to fill a card from a memory slot on, each slot begun by an instance or left empty."""
    if slot >= table.memory_slices:
        yield placed
        return
    for profile in table.profiles:
        if slot in profile.starts and slot in table.free_starts(placed, profile.name):
            here = Placed(profile.name, slot, profile.size)
            yield from _fill(table, here.end, (*placed, here))
    yield from _fill(table, slot + 1, placed)


def stranded(table: Geometry, placed: Sequence[Placed]) -> int:
    """Compute slices of a card that no instance of a layout has."""
    slices = {profile.name: profile.compute_slices for profile in table.profiles}
    return table.compute_slices - sum(slices[one.profile] for one in placed)


def best_layout(
    table: Geometry, profile: str, count: int, wanted: Mapping[str, int], present: Sequence[str] = ()
) -> Instances | None:
    """The best layout of one card with at least ``count`` instances of a profile, or None.

    ``wanted``: instances that others wait for, by profile; ``present``: the profiles on the card now.
    """
    before = Counter(present)

    def key(placed: Instances) -> tuple[int, int, int, int, int, tuple[str, ...]]:
        names = Counter(one.profile for one in placed)
        others = names - Counter({profile: count})
        served = sum(table.charge(name) * min(number, wanted.get(name, 0)) for name, number in others.items())
        kept = sum((names & before).values())
        memory = sum(one.size for one in placed)
        return stranded(table, placed), -served, -memory, -kept, len(placed), tuple(sorted(names.elements()))

    fitting = [one for one in full_layouts(table) if sum(each.profile == profile for each in one) >= count]
    return min(fitting, key=key, default=None)


def most_of(table: Geometry, profile: str) -> int:
    """How many instances of a profile an empty card can carry."""
    return max((sum(one.profile == profile for one in placed) for placed in full_layouts(table)), default=0)


def layout_for(
    state: PoolState,
    view: View,
    request: Request,
    need: Need,
    table: Geometry,
    wanted: Mapping[str, int] | None = None,
    keep_off: Collection[int] = (),
) -> tuple[Layout, ...] | None:
    """How to split drained cards of one node anew so that the request finds its slices there, or None. Cards of
    ``keep_off`` (ids) are left as they are.

    The node where the fewest cards change, then where they strand least, then the first. The request is one for
    slices that fits nowhere as things are; slices that are free already count.
    """
    best: tuple[tuple[int, int, int], tuple[Layout, ...]] | None = None
    eligible = state.fleet.eligible(request)
    for row in state.fleet.by_flavour.get(need.flavour or "", ()):
        node = state.nodes[state.fleet.nodes[row].id]
        if not eligible[row] or not host_fits(node, view, request):
            continue
        found = _on_node(state, view, request, need, table, wanted or {}, keep_off, row)
        if found is not None and (best is None or (*found[0], row) < best[0]):
            best = ((*found[0], row), found[1])
    return None if best is None else best[1]


def _on_node(
    state: PoolState,
    view: View,
    request: Request,
    need: Need,
    table: Geometry,
    wanted: Mapping[str, int],
    keep_off: Collection[int],
    row: int,
) -> tuple[tuple[int, int], tuple[Layout, ...]] | None:
    """The cards of a node to split anew, and how: their number, what they strand, the layouts."""
    lacking, most = request.per_node, most_of(table, request.profile)
    drained: list[tuple[int, int, list[str]]] = []
    for card in range(state.fleet.first[row], state.fleet.first[row + 1]):
        gpu = state.fleet.cards[card]
        if gpu_refusal(gpu, request, need.flavour or "") is not None:
            continue
        free = [one.profile for one in state.slices_of(card, view)]
        there = free.count(request.profile)
        lacking -= there
        untouched = not state.held[card] and len(free) == len(gpu.slices)
        if untouched and gpu.id not in view.spans and gpu.id not in keep_off:
            drained.append((most - there, card, free))
    layouts: list[Layout] = []
    lost = 0
    # Where a layout gains most, fewest cards change; among equal ones the emptiest card loses least.
    for gain, card, free in sorted(drained, key=lambda one: (-one[0], len(one[2]), one[1])):
        if lacking <= 0 or gain <= 0:
            break
        there = free.count(request.profile)
        count = there + min(gain, lacking)
        placed = best_layout(table, request.profile, count, wanted, free)
        if placed is None:
            break
        lacking -= count - there
        lost += stranded(table, placed)
        profiles = tuple((one.profile, one.start) for one in placed)
        layouts.append(Layout(state.fleet.cards[card].id, request.id, profiles))
    return ((len(layouts), lost), tuple(layouts)) if layouts and lacking <= 0 else None
