"""Health rules of cards: what is wrong by one reading; alert rules: who is beyond, and what becomes of it."""

from __future__ import annotations

from monitoring.engine.alerts import Firing, Step, steps
from monitoring.engine.health import Reading, odd_ones, problems_of


def codes(before: dict[str, int] | None = None, links_due: int | None = None, **reading: object) -> list[str]:
    values: dict[str, object] = {"more": {}, "missing": {}, **reading}
    return [p.code for p in problems_of(Reading(**values), before or {}, links_due)]  # type: ignore[arg-type]


def test_uncorrectable_errors_count_when_they_grow_and_after_a_driver_reload_from_zero() -> None:
    assert codes(more={"ecc_uncorr": 3}) == []  # the first reading says nothing about when
    assert codes({"ecc_uncorr": 3}, more={"ecc_uncorr": 3}) == []
    [problem] = problems_of(Reading({"ecc_uncorr": 5}, {}), {"ecc_uncorr": 3})
    assert (problem.code, problem.severity, problem.condition, problem.facts["errors"]) == (
        "gpu_ecc", "critical", "suspect", 2,
    )  # fmt: skip
    [again] = problems_of(Reading({"ecc_uncorr": 1}, {}), {"ecc_uncorr": 3})
    assert again.facts["errors"] == 1
    assert codes({"ecc_uncorr": 3}, more={"ecc_uncorr": 0}) == []


def test_remaps_pending_ask_for_a_reset_and_failed_ones_for_a_new_card() -> None:
    assert codes(more={"remap_pending": 1}) == ["gpu_remap_pending"]
    assert codes(more={"retired_pending": 1}) == ["gpu_remap_pending"]
    assert codes(more={"remap_pending": 1, "remap_failure": 1}) == ["gpu_remap_failed"]
    assert codes(more={"remap_pending": 0, "remap_failure": 0, "ecc_threshold": 0}) == []
    assert codes(more={"ecc_threshold": 1}) == ["gpu_ecc_replace"]


def test_throttling_counts_at_work_only() -> None:
    assert codes(throttle=0x20, activity_pm=900) == ["gpu_throttled"]
    assert codes(throttle=0x80, activity_pm=900) == ["gpu_power_brake"]
    assert codes(throttle=0x40, activity_pm=10) == []
    assert codes(throttle=0x4, activity_pm=900) == []  # a power cap is how a card runs at full load
    assert codes(throttle=None, activity_pm=900) == []


def test_an_idle_card_may_lower_its_link_generation_but_not_its_width() -> None:
    link = {"pcie_gen": 1, "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16}
    assert codes(more=link, activity_pm=0) == []
    assert codes(more=link, activity_pm=800) == ["gpu_link_gen"]
    assert codes(more={**link, "pcie_width": 8}, activity_pm=0) == ["gpu_link_width"]
    assert codes(more={"pcie_width": 8}) == []  # what it could be is not known


def test_nvlinks_are_compared_with_those_of_the_node() -> None:
    assert codes(links=17, links_due=18) == ["gpu_nvlink"]
    assert codes(links=18, links_due=18) == codes(links=17) == codes(links_due=18) == []


def test_an_error_where_a_number_is_due_is_a_finding_and_not_supported_is_none_p069() -> None:
    assert codes(missing={"fan": "error"}) == ["gpu_fan_error"]
    assert codes(missing={"power_mw": "error"}) == ["gpu_power_error"]
    assert codes(missing={"fan": "not_supported", "power_mw": "not_permitted", "sm": "error"}) == []
    assert codes(missing={"util": "reset_required"}) == ["gpu_reset_required"]


def test_odd_ones_need_a_majority() -> None:
    assert odd_ones({1: "550", 2: "550", 3: "535"}) == {3: "550"}
    assert odd_ones({1: "550", 2: "535"}) == {}
    assert odd_ones({1: "550", 2: "550", 3: "535", 4: "535"}) == {}
    assert odd_ones({1: "550", 2: "550", 3: "550", 4: ""}) == {}  # not told is not different


RULE = {"threshold": 85, "direction": "above", "for_ms": 60_000}


def test_a_value_fires_after_its_time_and_ends_at_once() -> None:
    assert steps({"g:1": 90.4, "g:2": 85}, {}, **RULE, now_ms=0) == {"g:1": Step("begin", 90, 90)}
    pending = {"g:1": Firing(0, False, 90)}
    assert steps({"g:1": 95}, pending, **RULE, now_ms=59_999) == {"g:1": Step("keep", 95, 95)}
    assert steps({"g:1": 88}, pending, **RULE, now_ms=60_000) == {"g:1": Step("open", 88, 90)}
    standing = {"g:1": Firing(0, True, 95)}
    assert steps({"g:1": 86}, standing, **RULE, now_ms=90_000) == {"g:1": Step("keep", 86, 95)}
    assert steps({"g:1": 85}, standing, **RULE, now_ms=90_000) == {"g:1": Step("end", 85, 95)}


def test_silence_is_no_recovery() -> None:
    assert steps({}, {"g:1": Firing(0, True, 95)}, **RULE, now_ms=90_000) == {}
    assert steps({}, {"g:1": Firing(0, False, 95)}, **RULE, now_ms=90_000) == {"g:1": Step("end", 95, 95)}


def test_below_keeps_the_lowest_and_no_wait_opens_at_once() -> None:
    rule = {"threshold": 4, "direction": "below", "for_ms": 0}
    assert steps({"pool": 3}, {}, **rule, now_ms=5) == {"pool": Step("open", 3, 3)}
    assert steps({"pool": 3}, {"pool": Firing(0, True, 1)}, **rule, now_ms=5) == {"pool": Step("keep", 3, 1)}
