"""New layouts of drained cards: real placements, the least stranded, as few cards as possible."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from pool.engine.decide import decide
from pool.engine.fit import need_of
from pool.engine.layout import best_layout, full_layouts, layout_for, most_of, stranded
from pool.engine.mig import Geometry, geometries, geometry, is_valid
from pool.engine.model import Layout, Member, Node, Plan, Policy, Running, Take
from pool.engine.state import PoolState
from quotas.engine.tree import QuotaNode
from tests.pool.engine.builders import FLAVOURS, NOW, ask, pool, quota, split_node

FACTS = {facts.code: facts for facts in FLAVOURS}


def a100() -> Geometry:
    table = geometry("A100-40GB")
    assert table is not None
    return table


def plan(
    nodes: list[Node], profile: str, count: int = 1, running: tuple[Member, ...] = (), **wanted: int
) -> tuple[Layout, ...] | None:
    request = ask(7, count, shape="mig", profile=profile)
    need = need_of(request, FACTS["A100"])
    assert need is not None
    state = PoolState(nodes, running)
    names = {name.replace("_", "."): number for name, number in wanted.items()}
    return layout_for(state, state.view(None), request, need, a100(), names)


def holds(node: Node, card: int, position: int) -> Member:
    one = node.gpus[card].slices[position]
    return Member(0, node.id, 0, 0, (Take(node.gpus[card].id, (one.span,), one.charge_milli, 1, one.id),))


@pytest.mark.parametrize("table", geometries(), ids=lambda table: table.key)
def test_full_layouts_are_real_and_complete(table: Geometry) -> None:
    """Each stands on a card and takes nothing more; every set of plain profiles that a card can carry is part of
    one."""
    layouts = full_layouts(table)
    for placed in layouts:
        assert is_valid(placed, table)
        assert not any(table.free_starts(placed, profile.name) for profile in table.profiles)
        assert 0 <= stranded(table, placed) <= table.compute_slices - 1
    names = [profile.name for profile in table.profiles if not profile.media][:4]
    for size in (1, 2, 3):
        for combo in combinations_with_replacement(names, size):
            within = any(
                all([one.profile for one in placed].count(name) >= combo.count(name) for name in combo)
                for placed in layouts
            )
            assert within == (table.layout(combo) is not None)


@pytest.mark.parametrize("key", ["A30", "A100-40GB", "RTX PRO 6000 Blackwell"])
def test_the_sets_are_those_of_the_exhaustive_search(key: str) -> None:
    table = geometry(key)
    assert table is not None
    assert [tuple(sorted(one.profile for one in placed)) for placed in full_layouts(table)] == list(
        table.layouts()
    )


def test_least_stranded_first() -> None:
    """A 3g leaves room for a 4g: nothing is stranded; a second 3g would strand a compute slice."""
    placed = best_layout(a100(), "3g.20gb", 1, {})
    assert placed is not None
    assert stranded(a100(), placed) == 0
    assert sorted(one.profile for one in placed) == ["3g.20gb", "4g.20gb"]


def test_among_equally_good_ones_what_others_wait_for() -> None:
    placed = best_layout(a100(), "4g.20gb", 1, {"1g.5gb": 5, "2g.10gb": 1})
    assert placed is not None
    assert sorted(one.profile for one in placed) == ["1g.5gb", "2g.10gb", "4g.20gb"]
    placed = best_layout(a100(), "4g.20gb", 1, {})
    assert placed is not None
    assert sorted(one.profile for one in placed) == ["3g.20gb", "4g.20gb"]


def test_how_many_a_card_carries() -> None:
    assert [most_of(a100(), name) for name in ("1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "9g")] == [
        7, 4, 3, 2, 1, 0,
    ]  # fmt: skip
    assert best_layout(a100(), "2g.10gb", 4, {}) is None


def test_a_drained_card_is_split_anew() -> None:
    (layout,) = plan([split_node(1, ["7g.40gb"])], "3g.20gb") or ()
    assert (layout.gpu_id, layout.for_request_id) == (100, 7)
    assert layout.profiles == (("4g.20gb", 0), ("3g.20gb", 4))


def test_cards_in_use_are_left_alone() -> None:
    node = split_node(1, ["3g.20gb", "2g.10gb"], count=2)
    assert plan([node], "7g.40gb", running=(holds(node, 0, 0),)) == (Layout(101, 7, (("7g.40gb", 0),)),)
    assert plan([node], "7g.40gb", running=(holds(node, 0, 0), holds(node, 1, 1))) is None


def test_slices_that_are_there_count() -> None:
    """Three of 2g are wanted; a used card has one free, so one drained card gives the other two."""
    node = split_node(1, ["2g.10gb", "2g.10gb", "2g.10gb"])
    other = split_node(2, ["7g.40gb"])
    both = Node(1, "n1", 1, "bj", (*node.gpus, *other.gpus), nvlink=True)
    found = plan([both], "2g.10gb", 3, (holds(node, 0, 0), holds(node, 0, 1)))
    assert found is not None
    assert [one.gpu_id for one in found] == [200]
    assert sum(name == "2g.10gb" for name, _ in found[0].profiles) >= 2


def test_as_few_cards_as_possible_and_none_for_too_much() -> None:
    nodes = [split_node(1, ["7g.40gb"], count=3), split_node(2, ["7g.40gb"], count=1)]
    found = plan(nodes, "1g.5gb", 10)
    assert found is not None
    assert [one.gpu_id for one in found] == [100, 101]
    assert plan(nodes, "1g.5gb", 22) is None
    assert plan(nodes, "4g.20gb", 4) is None


class TestDecided:
    """Layouts in a whole plan."""

    @staticmethod
    def plan(
        nodes: list[Node], *profiles: tuple[str, int], running: tuple[Running, ...] = (), **changes: object
    ) -> Plan:
        pending = [
            ask(number, count, shape="mig", profile=profile)
            for number, (profile, count) in enumerate(profiles, 1)
        ]
        return decide(pool(nodes, pending, running), Policy(), NOW)

    def test_a_drained_card_is_asked_for(self) -> None:
        result = self.plan([split_node(1, ["7g.40gb"])], ("3g.20gb", 1))
        assert result.places == ()
        assert result.layouts == (Layout(100, 1, (("4g.20gb", 0), ("3g.20gb", 4))),)
        assert [one.code for one in result.waiting] == ["no_slice_free"]

    def test_no_card_twice_and_what_others_want_counts(self) -> None:
        result = self.plan(
            [split_node(1, ["7g.40gb"], count=2)], ("3g.20gb", 1), ("3g.20gb", 1), ("4g.20gb", 1)
        )
        assert [(one.gpu_id, one.for_request_id) for one in result.layouts] == [(100, 1), (101, 2)]

    def test_nothing_is_asked_of_cards_in_use_or_about_to_be(self) -> None:
        node = split_node(1, ["7g.40gb"])
        one = node.gpus[0].slices[0]
        member = Member(0, 1, 0, 0, (Take(100, (one.span,), one.charge_milli, 1, one.id),))
        ending = Running(1, 99, 2, "A100", 1000, (member,), ending=True)
        assert self.plan([node], ("3g.20gb", 1), running=(ending,)).layouts == ()
        starting = self.plan([node], ("7g.40gb", 1), ("3g.20gb", 1))
        assert [one.request_id for one in starting.places] == [1]
        assert starting.layouts == ()

    def test_nothing_is_asked_for_whom_quota_refuses(self) -> None:
        tree = quota(QuotaNode(1, guarantee=1000), QuotaNode(2, 1, guarantee=100, hard_cap=100))
        pending = [ask(1, 1, shape="mig", profile="3g.20gb")]
        result = decide(pool([split_node(1, ["7g.40gb"])], pending, quotas=tree), Policy(), NOW)
        assert (result.layouts, [one.code for one in result.waiting]) == ((), ["quota_blocked"])
