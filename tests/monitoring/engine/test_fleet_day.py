"""A card's day: the parts add up to the whole, to the last millisecond, whatever happened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monitoring.engine.fleet_day import (
    DOWN,
    MAINTENANCE,
    OK,
    Held,
    Hour,
    StateSpan,
    StrandedSpan,
    card_day,
    use_days,
)

H = 3_600_000
DAY = 24 * H


def test_a_day_by_hand() -> None:
    """Held 02:00 to 08:00 whole, down 06:00 to 12:00, maintenance 20:00 to 24:00, a layout that strands 144."""
    states = [
        StateSpan(0, 6 * H, OK),
        StateSpan(6 * H, 12 * H, DOWN),
        StateSpan(12 * H, 20 * H, OK),
        StateSpan(20 * H, 30 * H, MAINTENANCE),
    ]
    sums = card_day(0, DAY, states, [Held(1, 2 * H, 8 * H, 1000)], [StrandedSpan(12 * H, 20 * H, 144)])
    assert (sums.installed, sums.allocated, sums.down, sums.maintenance) == (24 * H, 6 * H, 4 * H, 4 * H)
    assert sums.unallocated == 10 * H
    assert sums.stranded == 8 * H * 144 // 1000


def test_idle_is_the_covered_part_without_work_and_the_unseen_part_is_not_idle() -> None:
    hours = {0: Hour(H, H // 4), H: Hour(H // 2, 0), 2 * H: Hour(H, None)}
    (use,) = use_days(0, DAY, [Held(7, 0, 3 * H, 1000)], hours)
    assert use.allocated == 3 * H
    assert use.idle == 3 * H // 4 + H // 2
    assert use.unknown == H // 2 + H
    assert use.effective == H // 4 + H // 2 + H


def test_P059_eight_cards_ten_hours_at_20_percent_are_80_held_16_effective_64_idle() -> None:
    hours = {n * H: Hour(H, H // 5) for n in range(10)}
    held = [use for card in range(8) for use in use_days(0, DAY, [Held(card, 0, 10 * H, 1000)], hours)]
    assert [sum(getattr(use, part) for use in held) for part in ("allocated", "effective", "idle", "unknown")] == [
        80 * H, 16 * H, 64 * H, 0,
    ]  # fmt: skip


def test_a_short_lease_in_a_long_hour_is_not_blamed_for_the_time_around_it() -> None:
    """Ten busy minutes of an hour that nobody else held."""
    (use,) = use_days(0, DAY, [Held(1, 600_000, 1_200_000, 1000)], {0: Hour(H, 600_000)})
    assert (use.allocated, use.idle, use.unknown) == (600_000, 0, 0)


def test_two_halves_of_a_card_share_its_idle_time_by_what_they_held() -> None:
    uses = [Held(1, 0, H, 500), Held(2, 0, H, 250)]
    first, second = use_days(0, DAY, uses, {0: Hour(H, H // 2)})
    assert (first.allocated, first.idle) == (H // 2, H // 4)
    assert (second.allocated, second.idle) == (H // 4, H // 8)


moment = st.integers(-2 * H, 26 * H)
life = st.tuples(moment, st.integers(0, 30 * H), st.sampled_from([1, 142, 333]))
cuts = st.lists(
    st.tuples(moment, st.sampled_from([OK, DOWN, MAINTENANCE, None])), max_size=6, unique_by=lambda c: c[0]
)


@given(
    lives=st.lists(life, max_size=3),
    states=cuts,
    lost=st.lists(st.tuples(moment, st.integers(1, 5 * H), st.integers(1, 1000)), max_size=2),
    busy=st.dictionaries(
        st.integers(-1, 24),
        st.tuples(st.integers(0, H), st.one_of(st.none(), st.integers(0, 2 * H))),
        max_size=25,
    ),
    length=st.sampled_from([23 * H, 24 * H, 25 * H]),
)
def test_P061_the_identities_hold_for_any_life(
    lives: list, states: list, lost: list, busy: dict, length: int
) -> None:
    uses = [Held(n, start, start + span, charge) for n, (start, span, charge) in enumerate(lives)]
    ordered = sorted(states)
    spans = [
        StateSpan(at, ordered[n + 1][0] if n + 1 < len(ordered) else 30 * H, state)
        for n, (at, state) in enumerate(ordered)
        if state is not None
    ]
    stranded = [StrandedSpan(at, at + span, milli) for at, span, milli in lost]
    sums = card_day(0, length, spans, uses, stranded)
    assert sums.installed == sums.down + sums.maintenance + sums.unallocated + sums.allocated
    assert (
        min(sums.installed, sums.down, sums.maintenance, sums.unallocated, sums.allocated, sums.stranded) >= 0
    )
    assert sums.allocated <= sums.installed <= length
    assert sums.stranded <= sums.unallocated
    hours = {n * H: Hour(covered, used) for n, (covered, used) in busy.items()}
    days = use_days(0, length, uses, hours)
    assert sum(day.allocated for day in days) == sums.allocated
    for day in days:
        assert day.idle >= 0 and day.unknown >= 0
        assert day.allocated == day.effective + day.idle
        assert day.idle + day.unknown <= day.allocated


@given(lives=st.lists(life, min_size=1, max_size=3), cut=st.integers(1, 24 * H - 1))
def test_a_day_cut_in_two_sums_to_the_whole(lives: list, cut: int) -> None:
    uses = [Held(n, start, start + span, charge) for n, (start, span, charge) in enumerate(lives)]
    whole = card_day(0, DAY, [], uses).allocated
    assert card_day(0, cut, [], uses).allocated + card_day(cut, DAY, [], uses).allocated == whole
