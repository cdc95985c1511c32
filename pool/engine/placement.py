"""Where a request goes: the cheapest of all places that fit, by a fixed score, never at random.

What a place costs the pool is worked out in ``score``; which nodes make a gang in ``gang``. Here the two meet with
what a request itself prefers: data sets that lie on a node already, nodes with power left, models that others need
less. What fits is never turned away: every feasible place is looked at, the score only orders them. Costs are integers
and ties go to the lowest node id, so a plan is the same on any machine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pool.engine.fit import Need, gpu_refusal, host_share
from pool.engine.fleet import AMPLE, Fleet, Floats, Ints
from pool.engine.gang import choose
from pool.engine.model import Member, Request, Slice, Span, Take
from pool.engine.price import UNIT
from pool.engine.score import Costs, Work, fraction_rank, mig_rank
from pool.engine.state import ALL, NOTHING_HELD, GpuState, NodeState, PoolState, View, room

NO_DATA = 20 * UNIT
"""Cost of each named data set that is not on a node: staging it in outweighs all but the worst fragmentation."""
SAME_NODE = 60 * UNIT
"""Cost of a node on which another replica of the same service stands: one node's loss should not take both."""
OVER_POWER = 200 * UNIT
"""Cost of a node that may not draw what the request's cards may draw."""
IN_DOUBT = 100 * UNIT
"""Cost of a node whose health is in doubt."""
GPU_NODE_FOR_CPU = 1000 * UNIT
"""Cost of work without a GPU on a node that has some, where nodes kept for such work have room."""
SCARCITY_CAP = 5.0
LATENCY_CLASSES = frozenset({"inference"})
_INF = float("inf")


@dataclass(frozen=True, slots=True)
class Found:
    """The best place for a request: the need (and so the flavour) that it serves, and its members."""

    need: Need
    members: tuple[Member, ...]


def find(state: PoolState, view: View, request: Request, need: Need) -> tuple[Member, ...] | None:
    """Members for the whole request within ``view``, or None. Nothing is booked."""
    found = find_among(state, view, request, (need,))
    return None if found is None else found.members


def find_among(
    state: PoolState, view: View, request: Request, needs: Sequence[Need], *, scarcity: bool = True
) -> Found | None:
    """The best place over several flavours that the request may use equally well, or None. Nothing is booked.

    With ``scarcity`` models that tied demand presses on cost more.
    """
    kinds = state.kinds(view)
    offset = _offset(state, request)
    if request.avoid:
        offset = offset + [
            float(SAME_NODE) if node.id in request.avoid else 0.0 for node in state.fleet.nodes
        ]
    pressed = _scarcity(state) if scarcity and len(needs) > 1 else None
    best: tuple[float, list[int], Need, Costs] | None = None
    for costs, group in _works(state, request, needs):
        cost = costs.over(kinds) + offset
        if state.fleet.power_limited:
            draw = state.fleet.card_power * (group[0].milli * request.per_node / 1000)
            cost += np.where(np.array(state.headroom) < draw, float(OVER_POWER), 0.0)
        if pressed is not None:
            amount = group[0].milli * request.per_node
            cost += np.array([amount * rate for rate in pressed]).take(state.fleet.flavour_of_node)
        if request.nodes == 1:
            rows = [int(cost.argmin())] if len(cost) else []
        else:
            rows = choose(state.fleet, cost, request) or []
        total = sum(cost.item(row) for row in rows)
        if rows and total < _INF and (best is None or (-len(rows), total) < (-len(best[1]), best[0])):
            best = (total, rows, group[0] if len(group) == 1 else _need_on(state, rows[0], group), costs)
    if best is None:
        return None
    _, rows, need, costs = best
    members = tuple(
        _member(state, view, request, need, costs, number, row, int(kinds[row]))
        for number, row in enumerate(rows)
    )
    return Found(need, members)


def _works(state: PoolState, request: Request, needs: Sequence[Need]) -> list[tuple[Costs, list[Need]]]:
    """The costs that stand for a request on its flavours. Flavours that need the same amounts are judged as one,
    where a node has cards of one flavour only and any of them may take the whole request."""
    scorer, apart = state.scorer, request.nodes > 1 or state.fleet.mixed
    key = (
        request.shape, request.per_node, apart, request.profile, request.cpu_milli, request.memory_mib,
        request.min_gpu_mib, request.job_class in LATENCY_CLASSES,
        *[(need.flavour, need.milli, need.share_mib, need.charge_milli) for need in needs],
    )  # fmt: skip
    found: list[tuple[Costs, list[Need]]] | None = scorer.works.get(key)
    if found is None:
        groups: dict[Hashable, list[Need]] = {}
        for need in needs:
            groups.setdefault((need.milli, need.share_mib, need.flavour if apart else None), []).append(need)
        found = [(scorer.costs(_work(request, group)), group) for group in groups.values()]
        scorer.works[key] = found
    return found


def _work(request: Request, needs: Sequence[Need]) -> Work:
    """What a kind of node is judged by; amounts that the shape does not use are 0."""
    shape = request.shape
    flavours = frozenset(need.flavour for need in needs if need.flavour is not None)
    return Work(
        flavours=flavours if shape != "cpu" else frozenset(),
        shape=shape,
        count=request.per_node if shape != "cpu" else 0,
        milli=needs[0].milli if shape in ("whole", "fraction") else 0,
        mib=needs[0].share_mib if shape == "fraction" else 0,
        profile=request.profile if shape == "mig" else "",
        cpu=request.cpu_milli,
        memory=request.memory_mib,
        min_gpu_mib=request.min_gpu_mib if shape != "cpu" else 0,
        spread=request.job_class in LATENCY_CLASSES,
    )


def _need_on(state: PoolState, row: int, needs: Sequence[Need]) -> Need:
    flavours = state.fleet.flavours
    here = flavours[state.fleet.node_flavour[row]]
    return next(need for need in needs if need.flavour == here)


def _offset(state: PoolState, request: Request) -> Floats:
    """What each node costs a request beside the loss of room: infinite where it may not go."""
    fleet = state.fleet
    key = (
        fleet.eligibility_key(request), request.datasets if request.stage_datasets else (), request.shape == "cpu",
    )  # fmt: skip
    found = fleet.offsets.get(key)
    if found is None:
        found = np.where(fleet.eligible(request), 0.0, _INF)
        if any(node.caution for node in fleet.nodes):
            found += [float(IN_DOUBT) if node.caution else 0.0 for node in fleet.nodes]
        if request.shape == "cpu" and any(node.cpu_only for node in fleet.nodes):
            found += [0.0 if node.cpu_only else GPU_NODE_FOR_CPU for node in fleet.nodes]
        if request.datasets:
            wanted = set(request.datasets)
            found += [float(NO_DATA * len(wanted - node.datasets)) for node in fleet.nodes]
        fleet.offsets[key] = found
    return found


def _scarcity(state: PoolState) -> list[float] | None:
    """What one milli-GPU of each flavour costs for the scarcity of its model (the last entry: of a node without
    cards); None where no demand is tied.

    r_k = (share of the demand that is tied to model k) · (all free) / (free of k); an unconstrained ask pays
    min(r_k, 5)³ per GPU.
    """
    rates = scarcity_rates(state)
    if not rates:
        return None
    pressed = [min(rates.get(flavour, 0.0), SCARCITY_CAP) for flavour in state.fleet.flavours]
    return [*(float(round(rate * rate * rate * UNIT / 1000)) for rate in pressed), 0.0]


def scarcity_rates(state: PoolState) -> dict[str, float]:
    """How much the demand tied to each model presses on what is free of it, against the pool as a whole.

    Demand that accepts several models presses on each by what is free of it.
    """
    free = state.free_milli
    total = sum(free.values())
    rates: dict[str, float] = {}
    scorer = state.scorer
    for flavours, amount in scorer.tied:
        there = sum(free.get(flavour, 0) for flavour in flavours)
        pressure = amount * total / (scorer.demand_milli * max(1, there))
        for flavour in flavours:
            rates[flavour] = rates.get(flavour, 0.0) + pressure
    return rates


def scarcity(state: PoolState, demand: Mapping[str, int], flavour: str) -> float:
    """How much a given demand tied to a model presses on what is free of it; 0 where nobody needs just this one."""
    tied = demand.get(flavour, 0)
    return tied / max(1, state.free_milli.get(flavour, 0)) if tied else 0.0


def _member(
    state: PoolState, view: View, request: Request, need: Need, costs: Costs, number: int, row: int, kind: int
) -> Member:
    node = state.fleet.nodes[row]
    cpu, memory = request.cpu_milli, request.memory_mib
    if not cpu or not memory:
        free_cpu, free_memory = max(0, state.cpu[row]), max(0, state.memory[row])
        limit = view.host.get(node.id)
        if limit is not None:
            free_cpu, free_memory = max(0, min(free_cpu, limit[0])), max(0, min(free_memory, limit[1]))
        share = host_share(node, request)
        cpu = cpu or (min(share[0], free_cpu) if state.cpu[row] < AMPLE else 0)
        memory = memory or (min(share[1], free_memory) if state.memory[row] < AMPLE else 0)
    return Member(number, node.id, cpu, memory, _takes(state, view, request, need, costs, row, kind))


def _takes(
    state: PoolState, view: View, request: Request, need: Need, costs: Costs, row: int, kind: int
) -> tuple[Take, ...]:
    if request.shape == "cpu":
        return ()
    if request.shape == "mig":
        return _slice_takes(state, view, request, need, row)
    cards, all_cards = _cards(state, view, need, costs, row), state.fleet.cards
    if request.shape == "whole":
        return tuple([Take(all_cards[card].id, ALL, 1000, 0) for card, _ in _linked(state, cards, request)])
    if request.per_node == 1:
        wanted = costs.card_on(kind)
        chosen = [next(one for one in cards if room(one[1]) == wanted)]
    else:
        milli = np.array([room(free) for _, free in cards])
        order = np.argsort(fraction_rank(state.scorer.prices, milli, costs.work), kind="stable")
        chosen = [cards[place] for place in order[: request.per_node]]
    return tuple(
        [
            Take(all_cards[card].id, spans_for(free, need.milli), need.milli, need.share_mib)
            for card, free in chosen
        ]
    )


Card = tuple[int, tuple[Span, ...]]


def _cards(state: PoolState, view: View, need: Need, costs: Costs, row: int) -> list[Card]:
    """Cards of a node (by row) with room for one card or fraction of the work, and their free spans."""
    fleet, milli, sort = state.fleet, state.milli, state.fleet.card_sort
    found: list[Card] = []
    for card in range(fleet.first[row], fleet.first[row + 1]):
        if milli[card] < need.milli or not costs.allowed[sort[card]] or state.free_mib[card] < costs.work.mib:
            continue
        free = state.free[card]
        if view.spans and fleet.cards[card].id in view.spans:
            free = view.free(GpuState(state, card))
            if room(free) < need.milli:
                continue
        found.append((card, free))
    return found


def _linked(state: PoolState, cards: Sequence[Card], request: Request) -> list[Card]:
    """Cards of as few link groups as possible; the smallest group that suffices."""
    count = request.per_node
    if count == len(cards) or not state.scorer.linked:
        return list(cards[:count])
    groups: dict[int, list[Card]] = {}
    for one in cards:
        groups.setdefault(state.fleet.cards[one[0]].link_group, []).append(one)
    enough = [group for group in groups.values() if len(group) >= count]
    if enough:
        return min(enough, key=lambda group: (len(group), group[0]))[:count]
    ordered = sorted(groups.values(), key=lambda group: (-len(group), group[0]))
    return [card for group in ordered for card in group][:count]


def _slice_takes(state: PoolState, view: View, request: Request, need: Need, row: int) -> tuple[Take, ...]:
    fleet = state.fleet
    ranked: list[tuple[tuple[bool, int, int], int, list[Slice]]] = []
    for card in range(fleet.first[row], fleet.first[row + 1]):
        if gpu_refusal(fleet.cards[card], request, need.flavour or "") is None:
            free = state.slices_of(card, view)
            profiles = tuple(one.profile for one in free)
            if request.profile in profiles:
                rank = mig_rank(not state.held[card], profiles, request.profile)
                ranked.append((rank, card, [one for one in free if one.profile == request.profile]))
    ranked.sort(key=lambda one: one[:2])
    chosen = [(card, one) for _, card, free in ranked for one in free][: request.per_node]
    return tuple(
        Take(fleet.cards[card].id, (one.span,), need.milli, one.memory_mib, one.id) for card, one in chosen
    )


def spans_for(free: Sequence[Span], milli: int) -> tuple[Span, ...]:
    """``milli`` out of free spans: the smallest single gap that holds it, else gaps from the lowest on."""
    single = [span for span in free if span[1] - span[0] >= milli]
    if single:
        low, _ = min(single, key=lambda span: (span[1] - span[0], span[0]))
        return ((low, low + milli),)
    taken: list[Span] = []
    left = milli
    for low, high in free:
        part = min(left, high - low)
        taken.append((low, low + part))
        left -= part
        if left == 0:
            return tuple(taken)
    raise ValueError("the spans hold less than that")


# For the reasons that people are told


def host_fits(node: NodeState, view: View, request: Request) -> bool:
    """Whether the host has what was asked for explicitly; a share by GPUs never blocks."""
    return request.cpu_milli <= view.cpu(node) and request.memory_mib <= view.memory(node)


def places_free(state: PoolState, request: Request, need: Need) -> Ints:
    """By node row: how many cards, fractions (one a card) or slices of the request are free, promises aside."""
    kinds = state.kinds(NOTHING_HELD)
    state.scorer.settle()
    return state.scorer.costs(_work(request, (need,))).places(kinds)


def places_there(fleet: Fleet, request: Request, need: Need) -> Ints:
    """By node row: how many cards or slices there are that could serve the request, in use or not."""
    key = (need.flavour, request.shape == "mig", request.profile, request.min_gpu_mib)
    found = fleet.capacities.get(key)
    if found is None:
        counts = [0] * len(fleet)
        for card, gpu in enumerate(fleet.cards):
            if gpu_refusal(gpu, request, need.flavour or "") is None:
                slices = sum(one.profile == request.profile for one in gpu.slices)
                counts[fleet.card_node[card]] += slices if request.shape == "mig" else 1
        found = fleet.capacities[key] = np.array(counts, dtype=np.int64)
    return found


def largest_free(state: PoolState, request: Request, need: Need, rows: Iterable[int]) -> tuple[int, int]:
    """The largest free share and the most free memory of a card of these nodes that could serve the request."""
    fleet = state.fleet
    costs = state.scorer.costs(_work(request, (need,)))
    cards = [
        card
        for row in rows
        for card in range(fleet.first[row], fleet.first[row + 1])
        if costs.allowed[fleet.card_sort[card]] and state.milli[card]
    ]
    milli = max((state.milli[card] for card in cards), default=0)
    return milli, max((state.free_mib[card] for card in cards), default=0)
