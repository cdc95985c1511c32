"""Start ranges from history: nothing is told while little is known; what is told follows the line and the load."""

from __future__ import annotations

import random

from pool.engine.waits import ENOUGH, Outlook, size_class

MINUTE = 60_000


def served(outlook: Outlook, count: int, wait: int, begin: int = 0) -> int:
    """``count`` requests one after the other, each started ``wait`` after it came; returns the moment after."""
    at = begin
    for number in range(count):
        outlook.arrive((begin, number), "team", 1000, at)
        at += wait
        outlook.start((begin, number), at)
    return at


def test_nothing_is_told_while_little_is_known():
    outlook = Outlook()
    at = served(outlook, ENOUGH - 1, 10 * MINUTE)
    assert outlook.span("team", 1000, 1000, at) is None
    at = served(outlook, 1, 10 * MINUTE, at)
    assert outlook.span("team", 1000, 1000, at) is not None


def test_a_range_holds_the_next_wait_and_grows_with_what_stands_before():
    outlook = Outlook()
    at = served(outlook, 40, 10 * MINUTE)
    earliest, latest = outlook.span("team", 1000, 1000, at)
    assert earliest - at <= 10 * MINUTE <= latest - at
    far = outlook.span("team", 1000, 10_000, at)
    assert abs((far[0] - at) - 10 * (earliest - at)) < MINUTE
    assert abs((far[1] - at) - 10 * (latest - at)) < MINUTE


def test_who_waits_longer_than_others_did_widens_what_is_told():
    outlook = Outlook()
    at = served(outlook, 40, 10 * MINUTE)
    for number in range(20):
        outlook.arrive(("stuck", number), "team", 1000, at)
    later = at + 100 * MINUTE
    stuck = outlook.span("team", 1000, 1000, later)
    for number in range(20):
        outlook.leave(("stuck", number))
    without = outlook.span("team", 1000, 1000, later)
    assert stuck[0] == without[0]
    assert stuck[1] - later > 2 * (without[1] - later)


def test_another_line_learns_from_all_but_counts_its_own_rate():
    outlook = Outlook()
    at = served(outlook, 40, 10 * MINUTE)
    own, other = outlook.span("team", 1000, 1000, at), outlook.span("new", 1000, 1000, at)
    assert other is not None
    assert other[1] > own[1]


def test_most_waits_of_a_steady_queue_are_inside():
    rng, outlook = random.Random(3), Outlook()
    at, free_at, inside, told = 0, 0, 0, 0
    for number in range(600):
        at += rng.randrange(1, 20) * MINUTE
        ahead = outlook.arrive(number, "team", 1000, at)
        span = outlook.span("team", 1000, ahead, at)
        free_at = max(free_at, at + MINUTE) + rng.randrange(1, 20) * MINUTE
        outlook.start(number, free_at)
        if span is not None:
            told += 1
            inside += span[0] <= free_at <= span[1]
    assert told > 500
    assert inside / told > 0.85


def test_sizes_are_alike_by_powers_of_two():
    assert [size_class(milli) for milli in (250, 999, 1000, 2000, 3000, 4000, 8000, 9000)] == [
        -1, -1, 0, 1, 2, 2, 3, 4,
    ]  # fmt: skip
