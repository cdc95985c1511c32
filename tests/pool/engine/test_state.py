"""The pool as it changes in one decision: taking, giving back, and undoing both exactly."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pool.engine.model import WHOLE, Member, Snapshot, Take
from pool.engine.state import Overbooked, PoolState
from tests.pool.engine.builders import node, split_node
from tests.pool.engine.test_invariants import snapshots


def picture(state: PoolState) -> Any:
    """All that a decision can see of the pool."""
    return (
        {key: (list(card.free), card.free_mib, sorted(card.free_slices)) for key, card in state.gpus.items()},
        {key: (one.cpu, one.memory) for key, one in state.nodes.items()},
        dict(state.free_milli),
        list(state.holds),
        {key: list(rows) for key, rows in state.host_slack.items() if rows},
    )


def member(card: int, *spans: tuple[int, int], cpu: int = 0, mib: int = 0) -> Member:
    charge = sum(high - low for low, high in spans)
    return Member(0, card // 100, cpu, 0, (Take(card, spans, charge, mib),))


def test_given_back_is_free_as_before() -> None:
    state = PoolState([node(1, 2, "T4", cpu_milli=8000, memory_mib=4096)])
    fresh = picture(state)
    low, high = member(100, (0, 300), cpu=3000, mib=4096), member(100, (300, 1000), mib=8192)
    state.take(low)
    state.take(high)
    card = state.gpus[100]
    assert (list(card.free), card.free_mib, state.free_milli["T4"]) == ([], 4096, 1000)
    assert state.nodes[1].cpu == 5000
    state.give_back(low)
    assert (list(card.free), card.free_mib, state.free_milli["T4"]) == ([(0, 300)], 8192, 1300)
    state.give_back(high)
    assert picture(state) == fresh
    assert card.untouched


def test_memory_of_a_card_that_was_taken_whole_comes_back() -> None:
    state = PoolState([node(1, 1, "T4")])
    whole = member(100, WHOLE)
    state.take(whole)
    assert state.gpus[100].free_mib == 0
    state.give_back(whole)
    assert (state.gpus[100].free_mib, state.gpus[100].untouched) == (16384, True)


def test_slices_come_back() -> None:
    state = PoolState([split_node(1, ["3g.20gb", "2g.10gb", "1g.5gb"])])
    fresh = picture(state)
    one = state.gpus[100].gpu.slices[0]
    taken = Member(0, 1, 0, 0, (Take(100, (one.span,), one.charge_milli, one.memory_mib, one.id),))
    state.take(taken)
    assert one.id not in state.gpus[100].free_slices
    with pytest.raises(Overbooked):
        state.take(taken)
    state.give_back(taken)
    assert picture(state) == fresh


def test_a_refused_take_changes_nothing() -> None:
    state = PoolState([node(1, 2, "T4", cpu_milli=8000)])
    state.take(member(101, (500, 600)))
    before = picture(state)
    both = Member(0, 1, 1000, 0, (Take(100, (WHOLE,), 1000, 0), Take(101, (WHOLE,), 1000, 0)))
    for wrong in (both, member(199, WHOLE)):
        with pytest.raises(Overbooked):
            state.take(wrong)
        assert picture(state) == before


def test_giving_back_what_nobody_holds_is_refused_and_changes_nothing() -> None:
    state = PoolState([node(1, 2, "T4")])
    state.take(member(100, (0, 500)))
    before = picture(state)
    both = Member(0, 1, 0, 0, (Take(100, ((0, 500),), 500, 0), Take(101, (WHOLE,), 1000, 0)))
    with pytest.raises(Overbooked):
        state.give_back(both)
    assert picture(state) == before


@settings(max_examples=60, deadline=None)
@given(snapshots(), st.randoms(use_true_random=False))
def test_rollback_restores_exactly(snapshot: Snapshot, rng: random.Random) -> None:
    state = PoolState(snapshot.nodes)
    members = [m for one in snapshot.running for m in one.members]
    rng.shuffle(members)
    booked: list[Member] = []
    marks: list[tuple[int, Any, list[Member]]] = [(state.mark(), picture(state), [])]
    for one in members * 2:
        if rng.random() < 0.3:
            marks.append((state.mark(), picture(state), list(booked)))
        if one in booked:
            state.give_back(one)
            booked.remove(one)
        else:
            state.take(one)
            booked.append(one)
        if rng.random() < 0.2:
            start = rng.randrange(5)
            state.add_hold(rng.randrange(9), start, [one], state)
            state.spend_slack(one, start + rng.randrange(2))
        if len(marks) > 1 and rng.random() < 0.3:
            token, before, booked = marks.pop()
            state.rollback(token)
            assert picture(state) == before
            # What is free follows from what is booked, whatever the way there.
            again = PoolState(snapshot.nodes, booked)
            assert picture(state)[:3] == picture(again)[:3]
    state.rollback(marks[0][0])
    assert picture(state) == marks[0][1]
