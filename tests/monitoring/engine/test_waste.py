"""Rules of waste: what counts, what does not for want of data, and how much."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monitoring.engine.waste import (
    CardUse,
    Found,
    Look,
    Offer,
    Part,
    Rules,
    Tally,
    fractions_of,
    over_asked,
    share_between,
    tally_of,
    throttled,
    unusable_rest,
    waiting_for_data,
    wasted_ms,
)

RULES = Rules()
DAY = 86_400
PARTS = [Part("1g.10gb", 142, 9728), Part("2g.20gb", 285, 19968), *fractions_of(81920)]


def use(label: str = "n1/0", **changes: object) -> CardUse:
    values: dict[str, object] = {
        "label": label, "charge": 1000, "held_s": 2 * DAY, "covered_s": 2 * DAY, "quiet_s": 0, "p95_pm": 700,
        "peak_pm": 900, "basis": "sm", "memory_peak_mib": 60000, "memory_mib": 81920,
    }  # fmt: skip
    return CardUse(**{**values, **changes})  # type: ignore[arg-type]


def test_cards_that_never_worked_beside_others_that_did_are_too_many() -> None:
    cards = [use(f"n1/{i}", peak_pm=900 if i < 3 else 20, p95_pm=800 if i < 3 else 10) for i in range(4)]
    found = over_asked(cards, PARTS, RULES)
    assert found == Found(
        "over_asked", "count", 1000, "high",
        {"cards": 4, "hours": 48, "coverage_pm": 1000, "basis": "sm", "unused": 1, "which": ["n1/3"]},
    )  # fmt: skip


def test_work_in_which_no_card_did_anything_is_not_a_wrong_amount() -> None:
    assert over_asked([use(peak_pm=10, p95_pm=5, memory_peak_mib=100)] * 2, PARTS, RULES) is None


def test_the_smallest_part_that_holds_memory_and_activity_with_room_is_proposed() -> None:
    found = over_asked([use(p95_pm=200, peak_pm=260, memory_peak_mib=14000)], PARTS, RULES)
    assert found is not None
    # 14,000 × 1.2 MiB need 16,800, 200 × 1.3 need 260 milli: 2g.20gb (285, 19,968) is smaller than 0.3 of the card
    assert (found.rule, found.evidence["part"], found.waste_milli) == ("part", "2g.20gb", 715)
    # a little more activity, and the slice is too small; three tenths carry it
    more = over_asked([use(p95_pm=225, peak_pm=260, memory_peak_mib=14000)], PARTS, RULES)
    assert more is not None and more.evidence["part"] == "300"
    assert more.waste_milli == 700


def test_a_part_that_would_save_less_than_two_fifths_is_not_proposed() -> None:
    assert over_asked([use(p95_pm=480, peak_pm=500, memory_peak_mib=10000)], PARTS, RULES) is None


OFFERS = [Offer("L40S", 46068, 8), Offer("A10", 23028, 4), Offer("H20", 97871, 15)]


def test_the_cheapest_flavour_that_would_do_even_if_it_were_as_slow_as_it_is_cheap() -> None:
    found = over_asked(
        [use(p95_pm=300, peak_pm=500, memory_peak_mib=30000)], [], RULES, price=20, offers=OFFERS
    )
    # 30,000 × 1.2 MiB rule out the A10; 300 × 1.3 × 20 / 8 = 975 per mille fit on an L40S
    assert found is not None
    assert (found.rule, found.evidence["flavour"], found.waste_milli, found.confidence) == (
        "flavour", "L40S", 600, "medium",
    )  # fmt: skip
    assert found.evidence["level_there_pm"] == 750
    busier = over_asked([use(p95_pm=310, memory_peak_mib=30000)], [], RULES, price=20, offers=OFFERS)
    assert busier is not None and (busier.evidence["flavour"], busier.waste_milli) == ("H20", 250)
    assert over_asked([use(p95_pm=800, memory_peak_mib=30000)], [], RULES, price=20, offers=OFFERS) is None
    assert over_asked([use(p95_pm=100, memory_peak_mib=30000)], [], RULES, price=9, offers=OFFERS[:1]) is None
    low = use(p95_pm=100, peak_pm=200, memory_peak_mib=4000, basis="busy")
    guess = over_asked([low], [], RULES, price=20, offers=OFFERS)
    assert guess is not None and (guess.evidence["flavour"], guess.confidence) == ("A10", "low")


def test_of_a_part_and_a_flavour_the_one_that_saves_more_is_proposed_and_prices_are_needed() -> None:
    small = use(p95_pm=120, peak_pm=200, memory_peak_mib=4000)
    by_part = over_asked([small], PARTS, RULES, price=20, offers=OFFERS)
    assert by_part is not None and (by_part.rule, by_part.waste_milli) == ("part", 800)
    split = over_asked([small], [Part("500", 500, 40960)], RULES, price=20, offers=OFFERS)
    assert split is not None and (split.rule, split.evidence["flavour"], split.waste_milli) == (
        "flavour",
        "A10",
        800,
    )
    assert over_asked([small], [], RULES, price=0, offers=OFFERS) is None
    assert over_asked([small], [], RULES, price=20, offers=[Offer("free", 99999, 0)]) is None
    assert over_asked([use(memory_peak_mib=None)], [], RULES, price=20, offers=OFFERS) is None


def test_busy_time_bounds_the_need_from_above_and_lowers_the_confidence() -> None:
    found = over_asked([use(p95_pm=200, peak_pm=260, memory_peak_mib=4000, basis="busy")], PARTS, RULES)
    assert found is not None and found.confidence == "medium"


def test_too_short_a_time_too_little_telemetry_or_an_unknown_measure_give_no_finding() -> None:
    low = {"p95_pm": 100, "peak_pm": 120, "memory_peak_mib": 4000}
    assert over_asked([use(**low)], PARTS, RULES) is not None
    assert over_asked([use(**low, held_s=DAY - 1, covered_s=DAY - 1)], PARTS, RULES) is None
    assert over_asked([use(**low, covered_s=int(1.5 * DAY))], PARTS, RULES) is None
    assert over_asked([use(**{**low, "memory_peak_mib": None})], PARTS, RULES) is None
    assert over_asked([use(p95_pm=None, peak_pm=None)], PARTS, RULES) is None
    assert over_asked([use(**low), use(charge=500)], PARTS, RULES) is None


def look(**changes: object) -> Look:
    values: dict[str, object] = {
        "activity_pm": 300, "throttle": 0, "clock_mhz": 1980, "temp_c": 60, "cpu_pm": 400, "iowait_pm": 20,
    }  # fmt: skip
    return Look(**{**values, **changes})  # type: ignore[arg-type]


def test_one_look_has_one_cause_and_none_without_a_measure() -> None:
    assert tally_of(look(iowait_pm=200, cpu_pm=950, pcie_full=True), RULES).io == 1
    assert tally_of(look(iowait_pm=200, cpu_pm=950, pcie_full=True), RULES).cpu == 0
    assert tally_of(look(cpu_pm=950, pcie_full=True), RULES).pcie == 1
    assert tally_of(look(cpu_pm=950), RULES).cpu == 1
    unknown = tally_of(look(cpu_pm=None, iowait_pm=None), RULES)
    assert (unknown.looks, unknown.low, unknown.io, unknown.cpu, unknown.pcie) == (1, 1, 0, 0, 0)
    # a card that works well waits for nothing, and a quiet one is idle, not waiting
    assert tally_of(look(activity_pm=800, iowait_pm=300), RULES).io == 0
    assert tally_of(look(activity_pm=10, iowait_pm=300), RULES).io == 0


def tallied(n: int, **changes: object) -> Tally:
    out = Tally()
    for _ in range(n):
        out.add(tally_of(look(**changes), RULES))
    return out


def test_waiting_for_data_is_the_share_of_waits_times_what_was_not_done() -> None:
    tally = tallied(40, activity_pm=250, iowait_pm=300)
    tally.add(tallied(60, activity_pm=250))
    found = waiting_for_data(8000, tally, RULES)
    assert found is not None
    assert (found.kind, found.rule, found.confidence) == ("waiting_data", "io", "medium")
    assert found.waste_milli == 8000 * 40 * 750 // (100 * 1000) == 2400
    assert waiting_for_data(8000, tallied(59, iowait_pm=300), RULES) is None  # too few looks
    few = tallied(20, iowait_pm=300)
    few.add(tallied(80))
    assert waiting_for_data(8000, few, RULES) is None  # a fifth is not a third


def test_heat_costs_the_clock_that_is_missing() -> None:
    tally = tallied(25, activity_pm=900, throttle=0x40, clock_mhz=1410, temp_c=87)
    tally.add(tallied(75, activity_pm=900, clock_mhz=1880))
    found = throttled(1000, tally, RULES)
    assert found is not None
    assert (found.rule, found.confidence, found.waste_milli) == ("heat", "high", 62)  # 1000 × 25 % × 25 %
    assert found.evidence["temp_max_c"] == 87
    assert (found.evidence["clock_mhz"], found.evidence["free_clock_mhz"]) == (1410, 1880)


def test_a_loss_that_cannot_be_told_claims_no_hours() -> None:
    found = throttled(1000, tallied(40, activity_pm=900, throttle=0x8), RULES)
    assert found is not None
    assert (found.waste_milli, found.confidence, found.evidence["loss_pm"]) == (0, "low", None)


def test_a_power_cap_is_ordinary_unless_it_costs_a_tenth() -> None:
    capped = tallied(50, activity_pm=900, throttle=0x4, clock_mhz=1900)
    capped.add(tallied(50, activity_pm=900, clock_mhz=1980))
    assert throttled(1000, capped, RULES) is None
    dear = tallied(50, activity_pm=900, throttle=0x4, clock_mhz=1500)
    dear.add(tallied(50, activity_pm=900, clock_mhz=2000))
    found = throttled(1000, dear, RULES)
    assert found is not None and (found.rule, found.waste_milli) == ("power_cap", 125)


def test_throttle_reasons_of_an_idle_card_or_unknown_ones_do_not_count() -> None:
    assert throttled(1000, tallied(100, activity_pm=10, throttle=0x40), RULES) is None
    assert throttled(1000, tallied(100, activity_pm=900, throttle=None), RULES) is None


def test_a_rest_below_a_tenth_of_a_shared_card_is_of_use_to_nobody() -> None:
    assert [unusable_rest(used, RULES) for used in (0, 500, 900, 901, 950, 1000)] == [0, 0, 0, 99, 50, 0]


@given(
    total=st.integers(0, 10**15),
    start=st.integers(0, 10**12),
    cuts=st.lists(st.integers(1, 999_999), max_size=6, unique=True),
)
def test_a_total_that_is_cut_sums_to_itself(total: int, start: int, cuts: list[int]) -> None:
    inner = [start + cut for cut in sorted(cuts)]
    parts = share_between(total, start, start + 1_000_000, inner)
    assert sum(parts) == total
    assert len(parts) == len(cuts) + 1
    assert min(parts) >= 0


def test_wasted_time_is_milli_times_milliseconds() -> None:
    assert wasted_ms(4000, 0, 3_600_000) == 4 * 3_600_000
    assert wasted_ms(500, 10, 10) == wasted_ms(500, 20, 10) == 0
