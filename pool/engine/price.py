"""What a free share of a card is still good for: prices from the dual of the cutting-stock problem.

Cards are rolls of 1000 milli, the workload's sizes are the pieces cut from them. The linear programme

    fewest cards:   min Σ x_j      over patterns j (sets of pieces that fit one card), Σ_j a_ij x_j ≥ demand_i

has one dual price w_i per size: the part of a card that one more piece of that size costs where cards are cut as
well as can be. The value of a free share L is the best that can be cut from it, v(L) = max Σ w_i n_i with
Σ size_i n_i ≤ L: a step function that is 0 where nothing fits and 1 for a whole card. Placing a piece where v falls
least keeps what is left useful.

Source: Gilmore and Gomory, "A linear programming approach to the cutting-stock problem" (1961): columns are made
as needed by an unbounded knapsack. All arithmetic is elementwise or correctly rounded (``math.fsum``), so the same
demand gives the same prices to the last bit on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import fsum

import numpy as np
import numpy.typing as npt

CARD = 1000
UNIT = 1_000_000_000
"""Prices are integers in nano-GPU, so that sums of them are exact."""
SMALLEST = 20
"""Pieces below this many milli are priced as if they had it."""
SIZES = 48
"""At most this many sizes are priced, the most wanted ones."""
_EPS = 1e-9
_SAME = 1e-12
_ROUNDS = 2000

Floats = npt.NDArray[np.float64]
Prices = npt.NDArray[np.int64]


def price_table(demand: Mapping[int, int]) -> Prices:
    """v(0) … v(1000) in nano-GPU for a demand of pieces by size in milli: rising, 0 at 0, one GPU at 1000.

    The whole card is always a size. The answer is shared between callers: do not write to it.
    """
    wanted = {CARD: 0}
    for size, count in demand.items():
        if count > 0 and size > 0:
            bounded = min(CARD, max(SMALLEST, size))
            wanted[bounded] = wanted.get(bounded, 0) + count
    most = sorted(wanted.items(), key=lambda row: (row[0] != CARD, -row[1], row[0]))[:SIZES]
    return _price_table(tuple(sorted(most)))


@lru_cache(maxsize=64)
def _price_table(demand: tuple[tuple[int, int], ...]) -> Prices:
    sizes = [size for size, _ in demand]
    # Sizes that hardly anybody asks for still have a price: a small demand makes the optimum unique as well.
    floor = max(1, sum(count for _, count in demand)) * 1e-6
    prices = dual_prices(sizes, [count + floor * (1 + index) for index, (_, count) in enumerate(demand)])
    table = np.rint(knapsack(sizes, prices) * UNIT).astype(np.int64)
    table.setflags(write=False)
    return table


def dual_prices(sizes: list[int], demand: list[float]) -> list[float]:
    """The dual prices of the cutting-stock programme, by column generation.

    ``sizes`` distinct, in 1…1000; ``demand`` positive. Starts from the patterns of one size each and adds the most
    valuable pattern under the present prices until none is worth more than the card that it takes.
    """
    count = len(sizes)
    each = [CARD // size for size in sizes]
    # The basis is diag(each): its inverse, its prices, and how much of each pattern is used.
    inverse: Floats = np.diag([1.0 / amount for amount in each])
    used: Floats = np.array(demand, dtype=float) / np.array(each, dtype=float)
    cost = [1.0] * count
    for _ in range(_ROUNDS):
        prices = _prices(inverse, cost)
        entering, entering_cost = _entering(sizes, prices)
        if entering is None:
            return [max(0.0, price) for price in prices]
        direction = _times(inverse, entering)
        leaving = _leaving(used, direction)
        _pivot(inverse, used, direction, leaving)
        cost[leaving] = entering_cost
    raise ArithmeticError("the cutting-stock programme did not converge")


def knapsack(sizes: list[int], prices: list[float]) -> Floats:
    """The best value that can be cut from each share 0…1000, each size any number of times."""
    best: Floats = np.zeros(CARD + 1)
    for size, price in zip(sizes, prices, strict=True):
        if price > 0:
            for low in range(size, CARD + 1, size):
                high = min(low + size, CARD + 1)
                np.maximum(best[low:high], best[low - size : high - size] + price, out=best[low:high])
    return best


def _prices(inverse: Floats, cost: list[float]) -> list[float]:
    weighted = inverse * np.array(cost)[:, None]
    return [fsum(column) for column in weighted.T.tolist()]


def _entering(sizes: list[int], prices: list[float]) -> tuple[list[int] | None, float]:
    """The column that improves most: a surplus where a price is negative, else the best pattern."""
    lowest = min(prices)
    if lowest < -_EPS:
        surplus = [0] * len(sizes)
        surplus[prices.index(lowest)] = -1
        return surplus, 0.0
    best = knapsack(sizes, prices)
    if best[CARD] <= 1 + _EPS:
        return None, 0.0
    pattern = [0] * len(sizes)
    share = CARD
    while share > 0 and best[share] > 0:
        for index, size in enumerate(sizes):
            if (
                size <= share
                and prices[index] > 0
                and best[share - size] + prices[index] >= best[share] - _SAME
            ):
                pattern[index] += 1
                share -= size
                break
        else:
            share -= 1
    return pattern, 1.0


def _times(inverse: Floats, column: list[int]) -> Floats:
    weighted = inverse * np.array(column, dtype=float)[None, :]
    return np.array([fsum(row) for row in weighted.tolist()])


def _leaving(used: Floats, direction: Floats) -> int:
    """The basic column that runs out first; ties by the lowest index."""
    best, chosen = float("inf"), -1
    for index, (amount, rate) in enumerate(zip(used.tolist(), direction.tolist(), strict=True)):
        if rate > _EPS and amount / rate < best - _EPS * max(1.0, best if best < float("inf") else 1.0):
            best, chosen = amount / rate, index
    if chosen < 0:
        raise ArithmeticError("the cutting-stock programme has no bound")
    return chosen


def _pivot(inverse: Floats, used: Floats, direction: Floats, leaving: int) -> None:
    pivot_row = inverse[leaving] / direction[leaving]
    pivot_used = used[leaving] / direction[leaving]
    inverse -= direction[:, None] * pivot_row[None, :]
    used -= direction * pivot_used
    inverse[leaving] = pivot_row
    used[leaving] = pivot_used
    np.maximum(used, 0.0, out=used)
