"""Prices of free shares: cases worked out by hand, a linear programme solved otherwise, and what always holds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pool.engine.price import CARD, UNIT, dual_prices, knapsack, price_table


def at(table: np.ndarray, share: int) -> float:
    return table[share] / UNIT


def test_halves_and_whole_cards() -> None:
    table = price_table({500: 10, 1000: 10})
    assert [at(table, share) for share in (0, 499, 500, 999, 1000)] == [0, 0, 0.5, 0.5, 1]


def test_pieces_that_waste_the_rest_of_a_card_cost_a_whole_one() -> None:
    """600 fits once a card; 400 fills up what it leaves, and there are fewer of those: they are free."""
    table = price_table({600: 10, 400: 3})
    assert [round(at(table, share), 6) for share in (400, 599, 600, 999, 1000)] == [0, 0, 1, 1, 1]


def test_scarce_fillers_turn_the_price_around() -> None:
    """With more 400s than 600s the 400s decide: two of them fill a card, and a 600 saves the half it displaces."""
    table = price_table({600: 3, 400: 10})
    assert [round(at(table, share), 6) for share in (399, 400, 600, 800)] == [0, 0.5, 0.5, 1]


def test_nothing_known_prices_whole_cards_alone() -> None:
    table = price_table({})
    assert [at(table, share) for share in (0, 999, 1000)] == [0, 0, 1]


def test_sizes_of_the_trace_have_the_known_steps() -> None:
    """The steps that the rule was found with (a quarter, a third, a half, two thirds of a card)."""
    demand = {220: 20, 230: 40, 320: 300, 460: 60, 470: 330, 550: 20, 650: 250, 810: 400, 1000: 4000}
    table = price_table(demand)
    found = [round(at(table, share), 3) for share in (200, 230, 320, 470, 650, 810, 1000)]
    assert found == [0, 0.25, 0.333, 0.5, 0.667, 1, 1]


demands = st.dictionaries(st.integers(20, CARD), st.integers(1, 500), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(demands)
def test_table_rises_from_nothing_to_one(demand: dict[int, int]) -> None:
    table = price_table(demand)
    assert len(table) == CARD + 1
    assert (np.diff(table) >= 0).all()
    assert (table[0], table[CARD]) == (0, UNIT)


@settings(max_examples=60, deadline=None)
@given(demands)
def test_no_pattern_is_worth_more_than_its_card(demand: dict[int, int]) -> None:
    """v(a) + v(b) ≤ v(a + b): cutting a share in two never makes it worth more."""
    table = price_table(demand)
    for low, high in product(range(0, CARD + 1, 37), repeat=2):
        if low + high <= CARD:
            assert table[low] + table[high] <= table[low + high] + 2


@settings(max_examples=40, deadline=None)
@given(demands)
def test_prices_are_those_of_the_linear_programme(demand: dict[int, int]) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    sizes = sorted(demand)
    amounts = [float(demand[size]) for size in sizes]
    prices = dual_prices(sizes, amounts)
    assert knapsack(sizes, prices)[CARD] <= 1 + 1e-6
    # Weak duality bounds it from one side; the primal over the columns that the prices make tight from the other.
    value = sum(price * amount for price, amount in zip(prices, amounts, strict=True))
    patterns = _maximal_patterns(sizes)
    if patterns is None:
        return
    answer = optimize.linprog(
        np.ones(len(patterns)), A_ub=-np.array(patterns).T, b_ub=-np.array(amounts), method="highs"
    )
    assert value == pytest.approx(answer.fun, rel=1e-6)


def _maximal_patterns(sizes: list[int], most: int = 4000) -> list[list[int]] | None:
    """All ways to fill a card to which nothing can be added; None where there are very many."""
    found: list[list[int]] = []

    def grow(index: int, left: int, chosen: list[int]) -> bool:
        if len(found) > most:
            return False
        if index == len(sizes):
            if left < sizes[0]:
                found.append(chosen)
            return True
        return all(
            grow(index + 1, left - count * sizes[index], [*chosen, count])
            for count in range(left // sizes[index] + 1)
        )

    return found if grow(0, CARD, []) else None
