"""Admission: which level says no, with its figures, and that booking and unbooking are exact inverses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quotas.engine.available import admit, available_raw, headroom, over_by, sum_conflicts
from quotas.engine.charge import ChargeError, fraction_charge, mig_charge, mig_stranded, whole_charge
from quotas.engine.tree import QuotaNode, QuotaTree, TreeError


def tree(**leaf: int | None) -> QuotaTree:
    """Pool 32 cards, one lab 16 (cap 24), one team 8: milli-GPU."""
    team = {"guarantee": 8000, "hard_cap": 24000, "borrow_limit": 12000} | leaf
    return QuotaTree(
        [
            QuotaNode("pool", guarantee=32000),
            QuotaNode("lab", "pool", guarantee=16000, hard_cap=24000),
            QuotaNode("team", "lab", **team),  # type: ignore[arg-type]
        ]
    )


def test_fits_and_says_what_is_borrowed() -> None:
    answer = admit(tree(), "team", 10000, interruptible=True)
    assert (answer.fits, answer.blocking, answer.borrowed, answer.available) == (True, None, 2000, 20000)


def test_borrow_limit_blocks_on_the_leaf() -> None:
    answer = admit(tree(), "team", 20001, interruptible=True)
    assert answer.as_blocking() == {
        "level": "team", "rule": "borrow_limit", "limit": 20000, "used": 0, "requested": 20001,
    }  # fmt: skip


def test_cap_of_an_ancestor_blocks_and_is_named() -> None:
    quota = tree()
    quota.add("lab", 20000)
    answer = admit(quota, "team", 5000, interruptible=True)
    assert answer.as_blocking() == {
        "level": "lab", "rule": "hard_cap", "limit": 24000, "used": 20000, "requested": 5000,
    }  # fmt: skip


def test_work_that_may_not_be_interrupted_stays_within_the_guarantee() -> None:
    quota = tree()
    quota.add("team", 8000, interruptible=False)
    assert admit(quota, "team", 1, interruptible=True).fits
    assert admit(quota, "team", 1, interruptible=False).as_blocking() == {
        "level": "team", "rule": "guarantee", "limit": 8000, "used": 8000, "requested": 1,
    }  # fmt: skip


def test_nothing_starts_below_an_ancestor_over_its_quota() -> None:
    quota = QuotaTree(
        [
            QuotaNode("pool", guarantee=10),
            QuotaNode("a", "pool", guarantee=5, lend_limit=0),
            QuotaNode("b", "pool", guarantee=5),
        ]
    )
    quota.add("b", 8)
    assert available_raw(quota, "a") == 5 + (5 - 8)
    assert admit(quota, "a", 2, interruptible=True).fits
    assert admit(quota, "a", 3, interruptible=True).as_blocking() == {
        "level": "pool", "rule": "subtree_quota", "limit": 5, "used": 8, "requested": -2,
    }  # fmt: skip


def test_over_by_after_a_limit_fell() -> None:
    quota = QuotaTree(
        [QuotaNode("pool", guarantee=10), QuotaNode("a", "pool", guarantee=4, hard_cap=4, total=6)]
    )
    quota.recharge()
    assert over_by(quota, "a") == 2


def test_children_past_their_parent_are_told() -> None:
    quota = QuotaTree([QuotaNode(1, guarantee=4), QuotaNode(2, 1, guarantee=3), QuotaNode(3, 1, guarantee=3)])
    assert [(c.level, c.limit, c.requested) for c in sum_conflicts(quota)] == [(1, 4, 6)]


@pytest.mark.parametrize(
    "nodes",
    [
        [QuotaNode(1, 2)],
        [QuotaNode(1, 2), QuotaNode(2, 1)],
        [QuotaNode(1), QuotaNode(1)],
        [QuotaNode(1, guarantee=-1)],
        [QuotaNode(1, borrow_limit=-1)],
    ],
)
def test_impossible_trees_are_refused(nodes: list[QuotaNode]) -> None:
    with pytest.raises(TreeError):
        QuotaTree(nodes)


def test_removing_more_than_is_used_is_refused_and_changes_nothing() -> None:
    quota = tree()
    quota.add("team", 3)
    before = quota.snapshot()
    with pytest.raises(TreeError):
        quota.remove("team", 4)
    assert quota.snapshot() == before


def test_charges() -> None:
    assert whole_charge(8) == 8000
    assert fraction_charge(250, 20480, 81920) == 250
    assert fraction_charge(100, 40960, 81920) == 500
    assert [fraction_charge(0, 8192, 24576)] * 3 == [333, 333, 333]
    assert fraction_charge(0, 1, 81920) == 1
    assert mig_charge(1, 7) == 142
    assert mig_charge(3, 7) == 428
    assert mig_charge(7, 7) == 1000
    assert mig_stranded([142] * 7) == 6


@pytest.mark.parametrize("ask", [(0, 0, 100), (1001, 0, 100), (1, 101, 100), (-1, 5, 100), (5, 5, 0)])
def test_impossible_fractions(ask: tuple[int, int, int]) -> None:
    with pytest.raises(ChargeError):
        fraction_charge(*ask)


LIMIT = st.none() | st.integers(0, 12)


@st.composite
def forests(draw: st.DrawFn) -> QuotaTree:
    count = draw(st.integers(1, 7))
    nodes = []
    for n in range(count):
        parent = draw(st.integers(0, n - 1)) if n else None
        nodes.append(
            QuotaNode(
                n,
                parent,
                guarantee=draw(st.integers(0, 12)),
                borrow_limit=draw(LIMIT),
                lend_limit=draw(LIMIT),
                hard_cap=draw(st.none() | st.integers(0, 30)),
            )
        )  # fmt: skip
    return QuotaTree(nodes)


BOOKINGS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.booleans()), max_size=12)


@given(forests(), BOOKINGS)
def test_booking_keeps_the_identities_and_unbooking_undoes_it(quota: QuotaTree, bookings: list) -> None:
    empty = quota.snapshot()
    done = []
    for node, amount, interruptible in bookings:
        node %= len(quota.nodes)
        quota.add(node, amount, interruptible=interruptible)
        done.append((node, amount, interruptible))
        twin = quota.copy()
        twin.recharge()
        assert twin.snapshot() == quota.snapshot()
    for node, amount, interruptible in done:
        quota.remove(node, amount, interruptible=interruptible)
    assert quota.snapshot() == empty


@given(forests(), BOOKINGS, st.integers(0, 6), st.booleans())
def test_headroom_is_the_largest_ask_that_is_admitted(
    quota: QuotaTree, bookings: list, node: int, interruptible: bool
) -> None:
    for where, amount, kind in bookings:
        quota.add(where % len(quota.nodes), amount, interruptible=kind)
    node %= len(quota.nodes)
    room = headroom(quota, node, interruptible=interruptible)
    assert admit(quota, node, room, interruptible=interruptible).fits
    assert not admit(quota, node, room + 1, interruptible=interruptible).fits
    if room:
        quota.add(node, room, interruptible=interruptible)
        assert headroom(quota, node, interruptible=interruptible) == 0
