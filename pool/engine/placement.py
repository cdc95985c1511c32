"""Where a request goes: the best of all places that fit, by a fixed score, never at random.

Whole cards     the node that is left with the fewest free cards; cards of one link group before mixed ones
Gangs           one cluster before one site, never across sites; tightest nodes first
Fractions       the card that is shared already and is left with the least; the smallest single gap that fits
MIG slices      the node and cards with the fewest free slices of the profile left
What fits is never turned away: every feasible place is looked at, the score only orders them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pool.engine.fit import Need, gpu_refusal, host_share, node_refusal
from pool.engine.model import WHOLE, Member, Request, Slice, Span, Take
from pool.engine.state import AMPLE, GpuState, NodeState, PoolState, View, overlaps


def find(state: PoolState, view: View, request: Request, need: Need) -> tuple[Member, ...] | None:
    """Members for the whole request within ``view``, or None. Nothing is booked."""
    candidates: list[tuple[int, NodeState, list[GpuState]]] = []
    for node in nodes_of(state, need.flavour):
        if node_refusal(node.node, request) is not None or not host_fits(node, view, request):
            continue
        cards = cards_for(node, view, request, need)
        free = count_places(cards, view, request)
        if request.shape == "cpu":
            candidates.append((0 if node.node.cpu_only else 1, node, []))
        elif free >= request.per_node:
            candidates.append((free - request.per_node, node, cards))
    chosen = _choose_nodes(candidates, request.nodes)
    if chosen is None:
        return None
    return tuple(
        _member(number, node, cards, view, request, need) for number, (_, node, cards) in enumerate(chosen)
    )


def nodes_of(state: PoolState, flavour: str | None) -> Iterable[NodeState]:
    """The nodes that carry a flavour, by id; all of them for work without a GPU."""
    return state.nodes.values() if flavour is None else state.by_flavour.get(flavour, ())


def host_fits(node: NodeState, view: View, request: Request) -> bool:
    """Whether the host has what was asked for explicitly; a share by GPUs never blocks."""
    return request.cpu_milli <= view.cpu(node) and request.memory_mib <= view.memory(node)


def cards_for(node: NodeState, view: View, request: Request, need: Need) -> list[GpuState]:
    """Cards of a node with room for at least one card, fraction or slice of the request, best first."""
    if request.shape == "cpu" or need.flavour is None:
        return []
    found = [card for card in node.gpus if gpu_refusal(card.gpu, request, need.flavour) is None]
    if request.shape == "whole":
        return [card for card in found if card.untouched and view.free(card) == [WHOLE]]
    if request.shape == "mig":
        return [card for card in found if slices_for(card, view, request.profile)]
    fitting = [
        card for card in found if room(view.free(card)) >= need.milli and card.free_mib >= need.share_mib
    ]
    fitting.sort(key=lambda card: (card.untouched, room(view.free(card)), card.gpu.index, card.gpu.id))
    return fitting


def count_places(cards: Sequence[GpuState], view: View, request: Request) -> int:
    """How many cards, fractions or slices of the request these cards could take (a fraction: one a card)."""
    if request.shape == "mig":
        return sum(len(slices_for(card, view, request.profile)) for card in cards)
    return len(cards)


def slices_for(card: GpuState, view: View, profile: str) -> list[Slice]:
    """Free slices of a profile on a card, by memory slot."""
    free = [
        one
        for one in card.free_slices.values()
        if one.profile == profile
        and one.id not in view.slices
        and not overlaps(one.span, view.spans.get(card.gpu.id, ()))
    ]
    free.sort(key=lambda one: (one.span, one.id))
    return free


def room(free: Sequence[Span]) -> int:
    """Milli-GPU in some spans."""
    return sum(high - low for low, high in free)


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


def _choose_nodes(
    candidates: list[tuple[int, NodeState, list[GpuState]]], wanted: int
) -> list[tuple[int, NodeState, list[GpuState]]] | None:
    if len(candidates) < wanted:
        return None
    candidates.sort(key=lambda row: (row[0], row[1].node.id))
    if wanted == 1:
        return candidates[:1]
    for key in (_cluster, _site):
        groups: dict[str, list[tuple[int, NodeState, list[GpuState]]]] = {}
        for row in candidates:
            groups.setdefault(key(row[1]), []).append(row)
        full = [rows[:wanted] for rows in groups.values() if len(rows) >= wanted]
        if full:
            return min(full, key=lambda rows: (sum(row[0] for row in rows), rows[0][1].node.id))
    return None


def _cluster(node: NodeState) -> str:
    return f"{node.node.site}/{node.node.cluster_id}"


def _site(node: NodeState) -> str:
    return node.node.site


def _member(
    number: int, node: NodeState, cards: Sequence[GpuState], view: View, request: Request, need: Need
) -> Member:
    cpu, memory = host_share(node.node, request)
    return Member(
        number=number,
        node_id=node.node.id,
        cpu_milli=min(cpu, view.cpu(node)) if node.cpu != AMPLE else request.cpu_milli,
        memory_mib=min(memory, view.memory(node)) if node.memory != AMPLE else request.memory_mib,
        takes=tuple(_takes(cards, view, request, need)),
    )


def _takes(cards: Sequence[GpuState], view: View, request: Request, need: Need) -> list[Take]:
    if request.shape == "whole":
        return [Take(card.gpu.id, (WHOLE,), 1000, 0) for card in _linked(cards, request.per_node)]
    if request.shape == "fraction":
        return [
            Take(card.gpu.id, spans_for(view.free(card), need.milli), need.milli, need.share_mib)
            for card in cards[: request.per_node]
        ]
    takes: list[Take] = []
    by_fill = sorted(
        cards, key=lambda card: (len(slices_for(card, view, request.profile)), card.gpu.index, card.gpu.id)
    )
    for card in by_fill:
        for one in slices_for(card, view, request.profile)[: request.per_node - len(takes)]:
            takes.append(Take(card.gpu.id, (one.span,), need.milli, one.memory_mib, one.id))
    return takes


def _linked(cards: Sequence[GpuState], count: int) -> list[GpuState]:
    groups: dict[int, list[GpuState]] = {}
    for card in cards:
        groups.setdefault(card.gpu.link_group, []).append(card)
    enough = [group for group in groups.values() if len(group) >= count]
    if enough:
        return min(enough, key=lambda group: (len(group), group[0].gpu.index))[:count]
    ordered = sorted(groups.values(), key=lambda group: (-len(group), group[0].gpu.index))
    return [card for group in ordered for card in group][:count]


def scarcity(state: PoolState, demand: dict[str, int], flavour: str) -> float:
    """How much the demand tied to a model presses on what is free of it: an open ask should not spend it.

    (tied demand ÷ free of the model) against (all free): higher is scarcer; 0 where nobody needs just this
    model.
    """
    tied = demand.get(flavour, 0)
    if not tied:
        return 0.0
    return tied / max(1, state.free_milli.get(flavour, 0))
