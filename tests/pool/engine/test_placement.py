"""Where requests go: never twice the same, never turned away while a brute-force search finds a place, always the
same; and the preferences that order what fits."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from pool.engine.fit import Need, gpu_refusal, need_of, node_refusal
from pool.engine.model import WHOLE, Fabric, Gpu, Member, Mix, Node, Request, Take, TaskClass
from pool.engine.placement import Found, find, find_among, scarcity_rates
from pool.engine.state import PoolState, View
from tests.pool.engine.builders import FLAVOURS, MEMORY, NOW, ask, node, split_node

FACTS = {facts.code: facts for facts in FLAVOURS}


def place(state: PoolState, request: Request, view: View | None = None) -> tuple[Member, ...] | None:
    need = need_of(request, FACTS.get(request.flavours[0]) if request.flavours else None)
    return None if need is None else find(state, view or state.view(None), request, need)


def nodes_of(members: tuple[Member, ...] | None) -> list[int] | None:
    return None if members is None else [member.node_id for member in members]


def cards_of(members: tuple[Member, ...] | None) -> list[int] | None:
    return None if members is None else [take.gpu_id for member in members for take in member.takes]


def held(card: int, *span: int) -> Member:
    low, high = span or WHOLE
    return Member(
        0, card // 100, 0, 0, (Take(card, ((low, high),), high - low, 0 if high - low == 1000 else 1),)
    )


# Against an oracle


@st.composite
def pools(draw: st.DrawFn) -> list[Node]:
    made: list[Node] = []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        flavour = draw(st.sampled_from(["A100", "T4"]))
        if draw(st.integers(0, 5)) == 0:
            made.append(
                split_node(number, draw(st.sampled_from([["3g.20gb"] * 2, ["1g.5gb"] * 7, ["2g.10gb"] * 3])))
            )
            continue
        base = node(
            number,
            draw(st.integers(0, 3)),
            flavour,
            cluster_id=draw(st.integers(1, 2)),
            site=draw(st.sampled_from(["bj", "bj", "sh"])),
            cpu_milli=draw(st.sampled_from([None, 8000, 16000])),
            memory_mib=draw(st.sampled_from([None, 32768])),
            domain=draw(st.sampled_from([(), ("r1",), ("r1", "s1"), ("r1", "s2"), ("r2", "s1")])),
            fabrics=draw(st.sampled_from([(), (Fabric("infiniband", 400, "ib1"),), (Fabric("roce", 100),)])),
            blocked=draw(st.sampled_from([None, None, None, "cordoned"])),
        )
        cards = list(base.gpus)
        for index, card in enumerate(cards):
            cards[index] = replace(
                card,
                blocked=draw(st.sampled_from([None, None, None, "xid_79"])),
                link_group=draw(st.integers(0, 1)),
                flavour=draw(st.sampled_from([flavour, flavour, flavour, "T4"])),
            )
        cards = [replace(card, memory_mib=MEMORY[card.flavour]) for card in cards]
        made.append(replace(base, gpus=tuple(cards)))
    return made


@st.composite
def asks(draw: st.DrawFn) -> Request:
    shape = draw(st.sampled_from(["whole", "whole", "fraction", "fraction", "mig", "cpu"]))
    common = {
        "cpu_milli": draw(st.sampled_from([0, 0, 1000, 5000, 9000])),
        "memory_mib": draw(st.sampled_from([0, 0, 20000])),
        "job_class": draw(st.sampled_from(["training", "inference"])),
    }
    flavour = draw(st.sampled_from(["A100", "T4"]))
    if shape == "cpu":
        return replace(ask(1, 0, shape="cpu", nodes=draw(st.integers(1, 2)), **common), flavours=())
    if shape == "mig":
        profile = draw(st.sampled_from(["1g.5gb", "2g.10gb", "3g.20gb"]))
        return ask(1, draw(st.integers(1, 8)), "A100", shape="mig", profile=profile, **common)
    gang = {
        "nodes": draw(st.sampled_from([1, 1, 2, 3])),
        "domain_required": draw(st.sampled_from([None, None, 1, 2])),
        "domain_preferred": draw(st.sampled_from([None, 1])),
        "fabric": draw(st.sampled_from(["", "", "infiniband", "roce"])),
        "spread": draw(st.sampled_from([False, False, True])),
    }
    if gang["spread"]:
        gang |= {"domain_required": None, "fabric": ""}
    if shape == "whole":
        return ask(1, draw(st.integers(1, 3)), flavour, **gang, **common)
    milli = draw(st.sampled_from([100, 250, 300, 500, 700, 1000]))
    return ask(1, draw(st.integers(1, 2)), flavour, shape="fraction", milli=milli, **gang, **common)


def filled(made: list[Node], rng: random.Random) -> list[Member]:
    members: list[Member] = []
    for one in made:
        for card in one.gpus:
            choice = rng.random()
            if card.mig:
                members += [
                    Member(0, one.id, 0, 0, (Take(card.id, (cut.span,), cut.charge_milli, 1, cut.id),))
                    for cut in card.slices
                    if rng.random() < 0.4
                ]
            elif choice < 0.3:
                members.append(
                    Member(0, one.id, rng.choice([0, 3000]), 0, (Take(card.id, (WHOLE,), 1000, 0),))
                )
            elif choice < 0.7:
                low = rng.choice([0, 200])
                high = low + rng.choice([100, 300, 500])
                mib = card.memory_mib * (high - low) // 1000
                members.append(Member(0, one.id, 500, 0, (Take(card.id, ((low, high),), high - low, mib),)))
    return members


def places_on(state: PoolState, one: Node, request: Request, need: Need) -> int:
    """How many cards, fractions or slices of the request a node could give now."""
    total = 0
    for card in one.gpus:
        if gpu_refusal(card, request, need.flavour or "") is not None:
            continue
        free = state.gpus[card.id]
        if request.shape == "mig":
            total += sum(cut.profile == request.profile for cut in free.free_slices.values())
        elif request.shape == "whole":
            total += free.free_milli == 1000
        else:
            total += free.free_milli >= need.milli and free.free_mib >= need.share_mib
    return total


def may_share(one: Node, other: Node, request: Request) -> bool:
    if request.spread:
        return True
    if one.site != other.site:
        return False
    depth = request.domain_required
    if depth and not (one.domain[depth - 1] and other.domain[depth - 1]):
        return False
    if depth and (one.cluster_id, one.domain[:depth]) != (other.cluster_id, other.domain[:depth]):
        return False
    if request.fabric:
        islands = [
            next(
                fabric.domain or (each.site, each.cluster_id)
                for fabric in each.fabrics
                if fabric.kind == request.fabric
            )
            for each in (one, other)
        ]
        return islands[0] == islands[1]
    return True


def island_of(one: Node, kind: str) -> object:
    return next(fabric.domain or (one.site, one.cluster_id) for fabric in one.fabrics if fabric.kind == kind)


def could_be_placed(state: PoolState, made: list[Node], request: Request, need: Need) -> bool:
    """By trying all sets of nodes."""
    able = [
        one
        for one in made
        if node_refusal(one, request) is None
        and state.nodes[one.id].cpu >= request.cpu_milli
        and state.nodes[one.id].memory >= request.memory_mib
        and (request.shape == "cpu" or places_on(state, one, request, need) >= request.per_node)
    ]
    return any(
        all(may_share(one, other, request) for one, other in combinations(chosen, 2))
        for chosen in combinations(able, request.nodes)
    )


@settings(max_examples=400, deadline=None)
@given(pools(), asks(), st.randoms(use_true_random=False))
def test_what_fits_is_never_turned_away(made: list[Node], request: Request, rng: random.Random) -> None:
    state = PoolState(made, filled(made, rng))
    need = need_of(request, FACTS[request.flavours[0]] if request.flavours else None)
    if need is None:
        return
    members = find(state, state.view(None), request, need)
    assert (members is not None) == could_be_placed(state, made, request, need)
    if members is None:
        return
    assert len({member.node_id for member in members}) == request.nodes == len(members)
    assert [member.number for member in members] == list(range(request.nodes))
    for one, other in combinations([state.nodes[member.node_id].node for member in members], 2):
        assert may_share(one, other, request)
    for member in members:
        assert len(member.takes) == (0 if request.shape == "cpu" else request.per_node)
        assert len({(take.gpu_id, take.slice_id) for take in member.takes}) == len(member.takes)
        assert state.nodes[member.node_id].cpu >= member.cpu_milli >= request.cpu_milli
        state.take(member)  # raises where something is booked twice


@settings(max_examples=100, deadline=None)
@given(pools(), st.lists(asks(), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_nodes_and_cards_does_not_matter(
    made: list[Node], wanted: list[Request], rng: random.Random
) -> None:
    members = filled(made, random.Random(7))
    mixed = [replace(one, gpus=tuple(rng.sample(one.gpus, len(one.gpus)))) for one in made]
    rng.shuffle(mixed)
    one, other = PoolState(made, members), PoolState(mixed, rng.sample(members, len(members)))
    for request in wanted:
        found = place(one, request)
        assert found == place(other, request)
        for member in found or ():
            one.take(member)
            other.take(member)


@settings(max_examples=100, deadline=None)
@given(pools(), st.lists(asks(), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_scores_kept_from_before_give_the_same_places(
    made: list[Node], wanted: list[Request], rng: random.Random
) -> None:
    """Taking, giving back, undoing and promising in between leave no trace in what is kept of scores."""
    members = filled(made, rng)
    state = PoolState(made, members)
    promised = [member for member in members if rng.random() < 0.3]
    for request in wanted:
        token = state.mark()
        for member in rng.sample(members, len(members) // 2):
            state.give_back(member)
        found = place(state, request)
        for member in found or ():
            state.take(member)
        place(state, request)
        state.rollback(token)
        assert place(state, request) == place(PoolState(made, members), request)
        state.add_hold(5, 100, promised)
        again = PoolState(made, members)
        again.add_hold(5, 100, promised)
        assert place(state, request, state.view(200)) == place(again, request, again.view(200))
        state.rollback(token)


@settings(max_examples=150, deadline=None)
@given(pools(), asks(), st.randoms(use_true_random=False))
def test_promised_places_are_kept_off(made: list[Node], request: Request, rng: random.Random) -> None:
    """Who runs past a promise finds exactly what it would find were the promised places taken."""
    members = filled(made, rng)
    promised = [member for member in members if rng.random() < 0.5]
    others = [member for member in members if member not in promised]
    state = PoolState(made, others)
    state.add_hold(5, 100, promised)
    assert place(state, request, state.view(100)) == place(PoolState(made, others), request)
    assert place(state, request, state.view(None, request_id=5)) == place(PoolState(made, others), request)
    past, taken = place(state, request, state.view(101)), place(PoolState(made, members), request)
    assert (past is None) == (taken is None)
    for member in past or ():
        for take in member.takes:
            for keep in promised:
                for kept in keep.takes:
                    if kept.gpu_id == take.gpu_id:
                        overlap = any(a < d and c < b for a, b in take.spans for c, d in kept.spans)
                        assert not overlap


# What is preferred


def fractions(*sizes: int) -> Mix:
    return Mix(tuple((TaskClass(0, 1, size), 10) for size in sizes))


class TestPattern:
    def test_a_fraction_leaves_what_is_left_useful(self) -> None:
        """300 goes where 700 is left whole for others, not into a gap of 400 that two of 200 could have filled."""
        mix = fractions(300, 700, 200)
        state = PoolState([node(1, 2, "T4")], [held(100, 0, 300)], mix=mix)
        assert cards_of(place(state, ask(1, 1, "T4", shape="fraction", milli=700, share_mib=1))) == [100]

    def test_whole_cards_stay_whole_for_those_who_need_them(self) -> None:
        state = PoolState([node(1, 2, "T4")], [held(101, 0, 500)], mix=fractions(500, 1000))
        assert cards_of(place(state, ask(1, 1, "T4", shape="fraction", milli=500, share_mib=1))) == [101]

    def test_several_fractions_take_different_cards(self) -> None:
        state = PoolState([node(1, 3, "T4")], [held(101, 0, 500)], mix=fractions(500, 1000))
        found = place(state, ask(1, 2, "T4", shape="fraction", milli=500, share_mib=1))
        assert cards_of(found) == [101, 100]

    def test_work_that_eats_the_cpu_of_free_cards_goes_elsewhere(self) -> None:
        """Two nodes with the same free cards: the CPU is taken where less of it is needed to feed them."""
        mix = Mix(((TaskClass(8000, 1, 1000), 10),))
        rich, poor = node(1, 4, cpu_milli=96000), node(2, 4, cpu_milli=34000)
        state = PoolState([rich, poor], mix=mix)
        assert nodes_of(place(state, replace(ask(1, 0, shape="cpu", cpu_milli=30000), flavours=()))) == [1]

    def test_cpu_work_keeps_off_gpu_nodes_where_others_are_kept_for_it(self) -> None:
        state = PoolState([node(1, 4, cpu_milli=96000), node(2, 0, cpu_milli=96000, cpu_only=True)])
        only = replace(ask(1, 0, shape="cpu", cpu_milli=1000), flavours=())
        assert nodes_of(place(state, only)) == [2]


class TestScarcity:
    def test_an_open_ask_leaves_the_model_that_others_are_tied_to(self) -> None:
        mix = Mix(((TaskClass(0, 1, 1000), 10), (TaskClass(0, 1, 1000, ("H100",)), 10)))
        state = PoolState([node(1, 4, "H100"), node(2, 8, "A100")], mix=mix)
        needs = [Need("H100", 1000, 0, 1000), Need("A100", 1000, 0, 1000)]
        request = ask(1, 1, "H100", "A100")
        found = find_among(state, state.view(None), request, needs)
        assert isinstance(found, Found)
        assert (found.need.flavour, nodes_of(found.members)) == ("A100", [2])
        # Half of all demand presses on a third of the cards.
        assert scarcity_rates(state) == {"H100": 1.5}

    def test_it_is_taken_when_nothing_else_is_free(self) -> None:
        mix = Mix(((TaskClass(0, 1, 1000, ("H100",)), 10),))
        taken = [Member(0, 2, 0, 0, (Take(200, (WHOLE,), 1000, 0),))]
        state = PoolState([node(1, 4, "H100"), node(2, 1, "A100")], taken, mix=mix)
        needs = [Need("A100", 1000, 0, 1000), Need("H100", 1000, 0, 1000)]
        found = find_among(state, state.view(None), ask(1, 1, "A100", "H100"), needs)
        assert found is not None
        assert found.need.flavour == "H100"


class TestLinks:
    @staticmethod
    def linked(number: int, *groups: int) -> Node:
        base = node(number, len(groups))
        cards = tuple(replace(card, link_group=group) for card, group in zip(base.gpus, groups, strict=True))
        return replace(base, gpus=cards)

    def test_a_node_with_enough_linked_cards_is_preferred(self) -> None:
        """Node 1 would be filled better, but its two free cards are of two groups."""
        crossing, joined = self.linked(1, 0, 0, 1, 1), self.linked(2, 0, 0, 0, 0)
        state = PoolState([crossing, joined], [held(100), held(102)])
        assert cards_of(place(state, ask(1, 2))) == [200, 201]

    def test_cards_of_two_groups_are_better_than_none(self) -> None:
        state = PoolState([self.linked(1, 0, 0, 1, 1)], [held(100), held(102)])
        assert cards_of(place(state, ask(1, 2))) == [101, 103]

    def test_the_smallest_group_that_suffices(self) -> None:
        state = PoolState([self.linked(1, 0, 0, 0, 0, 1, 1)])
        assert cards_of(place(state, ask(1, 2))) == [104, 105]


class TestGangs:
    IB = (Fabric("infiniband", 400, "ib1"),)
    OTHER = (Fabric("infiniband", 400, "ib2"),)

    def test_the_closest_place_wins_over_the_tightest_fit(self) -> None:
        nodes = [
            node(1, 4, domain=("row1", "rack1")), node(2, 8, domain=("row1", "rack2")),
            node(3, 8, domain=("row1", "rack2")), node(4, 4, domain=("row2", "rack1")),
        ]  # fmt: skip
        assert nodes_of(place(PoolState(nodes), ask(1, 4, nodes=2))) == [2, 3]

    def test_one_row_when_no_rack_holds_it(self) -> None:
        nodes = [node(1, domain=("a", "1")), node(2, domain=("b", "1")), node(3, domain=("b", "2"))]
        assert nodes_of(place(PoolState(nodes), ask(1, 8, nodes=2))) == [2, 3]

    def test_a_required_domain_is_never_left(self) -> None:
        nodes = [node(1, domain=("a",)), node(2, domain=("b",)), node(3)]
        assert place(PoolState(nodes), ask(1, 8, nodes=2, domain_required=1)) is None
        together = [*nodes, node(4, domain=("a",))]
        assert nodes_of(place(PoolState(together), ask(1, 8, nodes=2, domain_required=1))) == [1, 4]

    def test_a_level_that_nothing_is_known_of_joins_nobody(self) -> None:
        nodes = [node(1, domain=("a", "")), node(2, domain=("a", ""))]
        assert place(PoolState(nodes), ask(1, 8, nodes=2, domain_required=2)) is None
        assert nodes_of(place(PoolState(nodes), ask(1, 8, nodes=2, domain_required=1))) == [1, 2]

    def test_domains_of_two_clusters_with_the_same_name_are_two(self) -> None:
        nodes = [node(1, domain=("a",), cluster_id=1), node(2, domain=("a",), cluster_id=2)]
        assert place(PoolState(nodes), ask(1, 8, nodes=2, domain_required=1)) is None

    def test_a_preferred_level_is_tight_enough(self) -> None:
        """Only the row matters: within it the nodes that are filled best."""
        nodes = [
            node(1, 8, domain=("a", "1")), node(2, 8, domain=("a", "1")),
            node(3, 4, domain=("a", "2")), node(4, 4, domain=("a", "3")),
        ]  # fmt: skip
        assert nodes_of(place(PoolState(nodes), ask(1, 4, nodes=2, domain_preferred=1))) == [3, 4]
        assert nodes_of(place(PoolState(nodes), ask(1, 4, nodes=2))) == [1, 2]

    def test_only_within_a_named_domain(self) -> None:
        nodes = [node(1, domain=("a", "1")), node(2, domain=("b", "1")), node(3)]
        assert nodes_of(place(PoolState(nodes), ask(1, 8, within=("b",)))) == [2]
        assert place(PoolState(nodes), ask(1, 8, within=("c",))) is None

    def test_a_fabric_must_be_shared_and_fast_enough(self) -> None:
        nodes = [node(1, fabrics=self.IB), node(2, fabrics=self.OTHER), node(3)]
        gang = ask(1, 8, nodes=2, fabric="infiniband")
        assert place(PoolState(nodes), gang) is None
        joined = [*nodes, node(4, fabrics=self.IB)]
        assert nodes_of(place(PoolState(joined), gang)) == [1, 4]
        assert place(PoolState(joined), replace(gang, min_fabric_gbps=800)) is None

    def test_an_nvlink_island_comes_first(self) -> None:
        island = (Fabric("nvlink", 7200, "rack-7"),)
        nodes = [
            node(1, domain=("a",)),
            node(2, domain=("a",)),
            node(3, fabrics=island),
            node(4, fabrics=island),
        ]
        assert nodes_of(place(PoolState(nodes), ask(1, 8, nodes=2))) == [3, 4]

    def test_infiniband_before_ethernet_where_nothing_was_asked(self) -> None:
        slow = (Fabric("ethernet", 100, "lan"),)
        nodes = [
            node(1, fabrics=slow),
            node(2, fabrics=slow),
            node(3, fabrics=self.IB),
            node(4, fabrics=self.IB),
        ]
        assert nodes_of(place(PoolState(nodes), ask(1, 8, nodes=2))) == [3, 4]

    def test_an_elastic_gang_takes_as_many_as_there_are(self) -> None:
        nodes = [node(1), node(2), node(3, site="sh")]
        elastic = ask(1, 8, nodes=4, min_nodes=2)
        assert nodes_of(place(PoolState(nodes), elastic)) == [1, 2]
        assert place(PoolState(nodes), replace(elastic, min_nodes=3)) is None
        assert place(PoolState(nodes), replace(elastic, min_nodes=None)) is None

    def test_spread_replicas_need_no_common_network(self) -> None:
        nodes = [node(1, site="bj"), node(2, site="sh")]
        assert nodes_of(place(PoolState(nodes), ask(1, 1, nodes=2, spread=True))) == [1, 2]
        assert place(PoolState(nodes), ask(1, 1, nodes=2)) is None


class TestClasses:
    def test_training_packs_and_inference_spreads(self) -> None:
        nodes = [node(1, 4), node(2, 4)]
        busy = [held(100), held(101)]
        assert nodes_of(place(PoolState(nodes, busy), ask(1, 1))) == [1]
        assert nodes_of(place(PoolState(nodes, busy), ask(1, 1, job_class="inference"))) == [2]

    def test_inference_shares_a_card_with_nobody_where_that_costs_nothing(self) -> None:
        half = {"shape": "fraction", "milli": 500, "share_mib": 1}
        state = PoolState([node(1, 2, "T4")], [held(100, 0, 500)], mix=fractions(500))
        assert cards_of(place(state, ask(1, 1, "T4", **half))) == [100]
        assert cards_of(place(state, ask(1, 1, "T4", job_class="inference", **half))) == [101]

    def test_inference_breaks_no_card_that_others_need(self) -> None:
        """Two 400s fill a card: taking 300 of a whole one costs half of it, the gap of 350 is good for nobody."""
        small = {"shape": "fraction", "milli": 300, "share_mib": 1}
        state = PoolState([node(1, 2, "T4")], [held(100, 0, 650)], mix=fractions(400, 1000))
        assert cards_of(place(state, ask(1, 1, "T4", job_class="inference", **small))) == [100]


class TestNodes:
    def test_data_on_the_spot_is_preferred_and_may_be_required(self) -> None:
        nodes = [node(1, 2), node(2, 8, datasets=frozenset({"imagenet"}))]
        assert nodes_of(place(PoolState(nodes), ask(1, 2, datasets=("imagenet",)))) == [2]
        elsewhere = ask(1, 2, datasets=("imagenet", "laion"))
        assert nodes_of(place(PoolState(nodes), elsewhere)) == [2]
        assert place(PoolState(nodes), replace(elsewhere, stage_datasets=False)) is None
        busy = [held(200 + index) for index in range(8)]
        assert nodes_of(place(PoolState(nodes, busy), ask(1, 2, datasets=("imagenet",)))) == [1]
        assert place(PoolState(nodes, busy), ask(1, 2, datasets=("imagenet",), stage_datasets=False)) is None

    def test_nodes_in_doubt_are_used_last(self) -> None:
        nodes = [node(1, 2, caution=True), node(2, 8)]
        assert nodes_of(place(PoolState(nodes), ask(1, 2))) == [2]
        assert nodes_of(place(PoolState(nodes, [held(200 + index) for index in range(8)]), ask(1, 2))) == [1]

    def test_power_is_kept_where_it_can_be(self) -> None:
        """Node 1 would be filled better but may draw one card's power only; it is used when nothing else is
        left."""
        card = {"power_mw": 400_000}
        nodes = [node(1, 2, card=card, power_headroom_mw=500_000), node(2, 8, card=card)]
        state = PoolState(nodes)
        assert nodes_of(place(state, ask(1, 2))) == [2]
        assert nodes_of(place(state, ask(1, 1))) == [1]
        token = state.mark()
        for member in place(state, ask(1, 1)) or ():
            state.take(member)
        assert (state.headroom[0], nodes_of(place(state, ask(2, 1)))) == (100_000, [2])
        state.rollback(token)
        assert (state.headroom[0], nodes_of(place(state, ask(2, 1)))) == (500_000, [1])
        full = PoolState(nodes, [held(200 + index) for index in range(8)])
        assert nodes_of(place(full, ask(1, 2))) == [1]
        # What runs already draws its power: it is not counted again.
        assert PoolState(nodes, [held(100)]).headroom[0] == 500_000

    def test_storage_is_required(self) -> None:
        nodes = [node(1), node(2, storage=frozenset({"nvme"}))]
        assert nodes_of(place(PoolState(nodes), ask(1, 1, storage="nvme"))) == [2]
        assert place(PoolState(nodes), ask(1, 1, storage="lustre")) is None

    def test_cards_of_several_models_on_one_node_are_never_mixed(self) -> None:
        cards = (Gpu(100, 0, "A100", 40960), Gpu(101, 1, "H100", 81920), Gpu(102, 2, "A100", 40960))
        state = PoolState([Node(1, "n1", 1, "bj", cards)])
        assert cards_of(place(state, ask(1, 2))) == [100, 102]
        assert place(state, ask(1, 3)) is None
        needs = [Need("A100", 1000, 0, 3000), Need("H100", 1000, 0, 3000)]
        assert find_among(state, state.view(None), ask(1, 3, "A100", "H100"), needs) is None


def test_amounts_that_the_host_has_not_told_do_not_block() -> None:
    state = PoolState([node(1, cpu_milli=None, memory_mib=None)])
    found = place(state, ask(1, 8, cpu_milli=10**7, memory_mib=10**7))
    assert found is not None
    assert (found[0].cpu_milli, found[0].memory_mib) == (10**7, 10**7)


def test_a_share_of_the_host_is_what_is_left_at_most() -> None:
    state = PoolState([node(1, 4, cpu_milli=8000)])
    state.take(Member(0, 1, 7000, 0, ()))
    found = place(state, ask(1, 2))
    assert found is not None
    assert found[0].cpu_milli == 1000


def test_every_shape_and_size_at_once() -> None:
    """A pool of all sorts of cards filled to the brim: every refusal is a true one, for every sort of request."""
    made = [node(1, 4), node(2, 3, "T4", cpu_milli=9000), split_node(3, ["3g.20gb", "2g.10gb", "1g.5gb"])]
    state = PoolState(made)
    sorts = [
        ask(1, 1), ask(1, 1, "T4", shape="fraction", milli=300), ask(1, 1, shape="mig", profile="2g.10gb"),
        ask(1, 2, "T4", shape="fraction", milli=150, cpu_milli=500),
    ]  # fmt: skip
    placed = 0
    for request, _ in product(sorts, range(20)):
        need = need_of(request, FACTS[request.flavours[0]])
        assert need is not None
        members = find(state, state.view(NOW), request, need)
        assert (members is not None) == could_be_placed(state, made, request, need)
        for member in members or ():
            state.take(member)
            placed += 1
    assert placed == 4 + 9 + 1 + 0
