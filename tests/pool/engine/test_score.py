"""The cost of a place, worked out by hand on small nodes, and the workload mix that it rests on."""

from __future__ import annotations

import pytest

from pool.engine import state as state_module
from pool.engine.fit import need_of
from pool.engine.mix import (
    FULL_WEIGHT,
    PRIOR,
    class_of,
    cpu_without_cards,
    learn,
    main_classes,
    mix_of,
    tied_demand,
    with_prior,
)
from pool.engine.model import Gpu, Member, Mix, Node, Request, Take, TaskClass
from pool.engine.placement import find
from pool.engine.price import UNIT
from pool.engine.score import PER_FREE_CPU, PER_FREE_MILLI, Scorer, Work
from pool.engine.state import NOTHING_HELD, PoolState
from tests.pool.engine.builders import FLAVOURS, ask, node, run, split_node

FACTS = {facts.code: facts for facts in FLAVOURS}
T4 = frozenset({"T4"})


def cost(state: PoolState, work: Work, row: int = 0) -> float:
    return float(state.scorer.costs(work).over(state.kinds(NOTHING_HELD))[row])


def take(card: int, low: int, high: int) -> Member:
    return Member(0, card // 100, 0, 0, (Take(card, ((low, high),), high - low, 1),))


class TestCost:
    def test_a_whole_card(self) -> None:
        """Two free cards, one class of single whole cards: P and U each lose one card, 1000 milli stay free."""
        state = PoolState([node(1, 2, "T4")], mix=Mix(((TaskClass(0, 1, 1000), 5),)))
        work = Work(T4, "whole", 1, 1000)
        assert cost(state, work) == 30 * UNIT + UNIT + PER_FREE_MILLI * 1000

    def test_the_last_pair_of_cards_is_worth_more_than_its_half(self) -> None:
        """Half of the work needs two cards: one of two free ones costs the pair (U: 2 · ½) and the single (½)."""
        mix = Mix(((TaskClass(0, 1, 1000), 5), (TaskClass(0, 2, 1000), 5)))
        state = PoolState([node(1, 2, "T4"), node(2, 3, "T4")], mix=mix)
        work = Work(T4, "whole", 1, 1000)
        assert cost(state, work, 0) == 30 * UNIT + UNIT // 2 + UNIT + PER_FREE_MILLI * 1000
        assert cost(state, work, 1) == 30 * UNIT + UNIT // 2 + UNIT // 2 + PER_FREE_MILLI * 2000

    def test_a_fraction_takes_the_share_that_is_good_for_least(self) -> None:
        """Halves and whole cards are asked for. A card with 700 free is worth a half; taking 200 leaves the half
        whole, so P loses nothing, and U (for whom 500 fits) the 200 that were usable."""
        mix = Mix(((TaskClass(0, 1, 500), 5),))
        state = PoolState([node(1, 2, "T4")], [take(100, 0, 300)], mix=mix)
        work = Work(T4, "fraction", 1, 200, 1)
        assert cost(state, work) == UNIT // 5 + PER_FREE_MILLI * 1500
        kind = int(state.kinds(NOTHING_HELD)[0])
        assert state.scorer.costs(work).card_on(kind) == 700

    def test_usable_cards_are_capped_by_the_cpu_that_feeds_them(self) -> None:
        """Work of 10 vCPU a card: 20 vCPU feed 2 cards, times 1.93 are 3.86 of the 4. Taking 10 vCPU costs half."""
        mix = Mix(((TaskClass(10_000, 1, 1000), 5),))
        state = PoolState([node(1, 4, "T4", cpu_milli=20_000)], mix=mix)
        work = Work(frozenset(), "cpu", 0, cpu=10_000)
        assert cost(state, work) == 1.93 * UNIT + PER_FREE_MILLI * 4000 + PER_FREE_CPU * 10_000

    def test_cpu_that_goes_to_work_without_cards_feeds_none(self) -> None:
        """Half of all CPU: the same 20 vCPU are counted on to feed half as many cards."""
        mix = Mix(((TaskClass(10_000, 1, 1000), 5), (TaskClass(5_000, 0, 0), 10)))
        assert cpu_without_cards(mix) == 0.5
        state = PoolState([node(1, 4, "T4", cpu_milli=20_000)], mix=mix)
        work = Work(frozenset(), "cpu", 0, cpu=10_000)
        assert cost(state, work) == 0.965 * UNIT + PER_FREE_MILLI * 4000 + PER_FREE_CPU * 10_000

    def test_classes_that_may_not_use_a_model_do_not_count_on_it(self) -> None:
        """Half of the work wants 500 of an A100 only: on a T4 the other half is all there is."""
        mix = Mix(((TaskClass(0, 1, 1000), 5), (TaskClass(0, 1, 500, ("A100",)), 5)))
        state = PoolState([node(1, 1, "T4"), node(2, 1, "A100")], mix=mix)
        both = Work(frozenset({"T4", "A100"}), "whole", 1, 1000)
        assert cost(state, both, 0) == 30 * UNIT + UNIT
        assert cost(state, both, 1) == 30 * UNIT + UNIT
        half = Work(frozenset({"T4", "A100"}), "fraction", 1, 500, 1)
        assert cost(state, half, 0) == 15 * UNIT + UNIT + PER_FREE_MILLI * 500
        assert cost(state, half, 1) == 15 * UNIT + UNIT // 2 + UNIT // 4 + PER_FREE_MILLI * 500

    @pytest.mark.parametrize(
        "work",
        [
            Work(T4, "whole", 3, 1000),
            Work(T4, "fraction", 1, 800, 1),
            Work(T4, "whole", 1, 1000, cpu=4001),
            Work(T4, "whole", 1, 1000, memory=1025),
            Work(frozenset({"H100"}), "whole", 1, 1000),
            Work(T4, "whole", 1, 1000, min_gpu_mib=20_000),
            Work(T4, "mig", 1, profile="1g.5gb"),
        ],
    )
    def test_infinite_where_it_does_not_fit(self, work: Work) -> None:
        host = {"cpu_milli": 4000, "memory_mib": 1024}
        state = PoolState([node(1, 2, "T4", **host)], [take(100, 0, 300), take(101, 0, 250)])
        assert cost(state, work) == float("inf")

    def test_slices_of_cards_in_use_are_cheaper(self) -> None:
        used, drained = split_node(1, ["3g.20gb", "3g.20gb"]), split_node(2, ["3g.20gb", "3g.20gb"])
        one = used.gpus[0].slices[0]
        held = Member(0, 1, 0, 0, (Take(100, (one.span,), one.charge_milli, 1, one.id),))
        state = PoolState([used, drained], [held])
        work = Work(frozenset({"A100"}), "mig", 1, profile="3g.20gb")
        assert (cost(state, work, 0), cost(state, work, 1)) == (0, UNIT + UNIT // 100)

    def test_nodes_in_one_state_are_one_kind(self) -> None:
        state = PoolState(
            [node(number, 4, "T4") for number in range(1, 6)], [take(100, 0, 300), take(203, 500, 800)]
        )
        kinds = state.kinds(NOTHING_HELD).tolist()
        assert kinds[0] == kinds[1]
        assert len(set(kinds[2:])) == 1
        assert kinds[0] != kinds[2]


def test_scores_that_grow_too_many_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "MOST_KINDS", 2)
    nodes = [node(1, 4, "T4"), node(2, 3, "T4"), node(3, 2, "T4")]
    request = ask(1, 1, "T4")
    need = need_of(request, FACTS["T4"])
    assert need is not None
    state, places = PoolState(nodes), []
    while (members := find(state, state.view(None), request, need)) is not None:
        fresh = PoolState(nodes, list(places))
        assert find(fresh, fresh.view(None), request, need) == members
        state.take(members[0])
        places.append(members[0])
    assert len(places) == 9
    assert state.scorer.kinds.count <= 4


def test_what_a_view_knows_of_old_scores_is_forgotten_with_them() -> None:
    nodes = [node(1, 2, "T4"), node(2, 2, "T4"), node(3, 1, "T4")]
    state = PoolState(nodes, [take(200, 0, 300)])
    promised = Member(0, 1, 0, 0, (Take(100, ((0, 1000),), 1000, 0),))
    state.add_hold(9, 0, [promised])
    view, request = state.view(None), ask(1, 2, "T4")
    need = need_of(request, FACTS["T4"])
    assert need is not None
    assert find(state, view, request, need) is None
    # Under another mix kinds are numbered anew, in another order.
    state.relearn(Mix(((TaskClass(0, 1, 500), 1),)))
    assert find(state, view, request, need) is None
    assert find(state, NOTHING_HELD, request, need) is not None
    # The one card left of node 1 is the tightest place.
    single = find(state, view, ask(2, 1, "T4"), need)
    assert single is not None
    assert [take.gpu_id for take in single[0].takes] == [101]


class TestMix:
    def test_what_waits_and_runs(self) -> None:
        pending = [
            ask(1, 2, "A100", nodes=3, cpu_milli=500), ask(2, 1, "A100", "H100", "T4"),
            ask(3, 1, "T4", shape="fraction", milli=100, share_mib=8192), ask(4, 1, shape="mig", profile="1g.5gb"),
            ask(5, 1, "B200"),
        ]  # fmt: skip
        mix = learn(pending, [run(1, 1, [0, 1], cpu_milli=900)] * FULL_WEIGHT, FACTS)
        assert dict(mix.classes) == {
            TaskClass(900, 2, 1000): FULL_WEIGHT,
            TaskClass(500, 2, 1000, ("A100",)): 3,
            TaskClass(0, 1, 1000): 1,
            TaskClass(0, 1, 500, ("T4",)): 1,
        }

    def test_the_prior_gives_way(self) -> None:
        one = TaskClass(0, 1, 700)
        assert dict(with_prior({}).classes).keys() == dict(PRIOR.classes).keys()
        half = dict(with_prior({one: FULL_WEIGHT // 2}).classes)
        assert half[one] * 2 == pytest.approx(sum(half.values()), rel=0.01)
        assert with_prior({one: FULL_WEIGHT}) == Mix(((one, FULL_WEIGHT),))

    def test_work_without_cards_is_a_class_too(self) -> None:
        assert class_of(Request(1, 2, (), shape="cpu", per_node=0, cpu_milli=7000), FACTS) == TaskClass(
            7000, 0, 0
        )

    def test_rare_classes_are_left_out(self) -> None:
        mix = mix_of({TaskClass(0, 1, 1000): 90, TaskClass(1000, 0, 0): 8, TaskClass(0, 1, 300): 2})
        assert main_classes(mix) == [(TaskClass(0, 1, 1000), 90)]

    def test_demand_that_any_model_may_serve_is_not_tied(self) -> None:
        mix = mix_of(
            {
                TaskClass(0, 2, 1000, ("T4",)): 3,
                TaskClass(0, 1, 500, ("A100", "T4")): 4,
                TaskClass(0, 1, 1000, ("A100", "H100", "T4")): 5,
                TaskClass(0, 1, 1000, ("gone",)): 9,
                TaskClass(0, 1, 1000): 6,
            }
        )
        assert tied_demand(mix, ["A100", "H100", "T4"]) == [(("T4",), 6000), (("A100", "T4"), 2000)]
        assert tied_demand(mix, ["A100", "H100", "T4"], most=1) == [(("T4",), 6000)]


def test_a_mix_without_cards_falls_back_on_whole_cards() -> None:
    scorer = Scorer(
        PoolState([Node(1, "n", 1, "s", (Gpu(1, 0, "T4", 1),))]).fleet, Mix(((TaskClass(9, 0, 0), 3),))
    )
    assert (scorer.prices[999], scorer.prices[1000]) == (0, UNIT)
