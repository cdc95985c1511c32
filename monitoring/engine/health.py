"""What is wrong with a card, from its counters and states: codes with figures. Pure.

Sources of the rules: NVIDIA's GPU memory error management (row remapping, page retirement), NVML clock event
reasons, XID catalogue (those are events and judged elsewhere). A missing measure is unknown and raises nothing;
an `error` where a number was due is itself a finding (behaviour P069).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from monitoring.engine.waste import HOT, POWER_BRAKE

WARNING, CRITICAL = "warning", "critical"
OK, SUSPECT, FAULT = "ok", "suspect", "fault"
BUSY_PM = 50
FAN_DUE_C = 70


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample as health sees it. `more` and `missing` are those of the last state; `links` NVLinks that are up."""

    more: Mapping[str, int]
    missing: Mapping[str, str]
    throttle: int | None = None
    activity_pm: int | None = None
    temp_c: int | None = None
    links: int | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `condition` is what it asks of the pool: ok (only told), suspect, fault.

    `after_s`: so long it must be seen before it counts; `latched`: it stays until a person clears it.
    """

    code: str
    severity: str
    condition: str = OK
    after_s: int = 0
    latched: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


def problems_of(reading: Reading, before: Mapping[str, int], links_due: int | None = None) -> list[Problem]:
    """What is wrong by this reading. `before`: counters of the last one (empty: none); `links_due`: NVLinks that a
    card of this kind has on its node."""
    more = reading.more
    out: list[Problem] = []
    grown = _grown(more, before, "ecc_uncorr")
    if grown:
        facts = {"errors": grown, "since_driver_load": more["ecc_uncorr"]}
        out.append(Problem("gpu_ecc", CRITICAL, SUSPECT, latched=True, facts=facts))
    if more.get("ecc_threshold") == 1:
        out.append(Problem("gpu_ecc_replace", CRITICAL, FAULT, facts={"total": more.get("ecc_uncorr_total")}))
    if more.get("remap_failure") == 1:
        out.append(Problem("gpu_remap_failed", CRITICAL, FAULT, facts=_remaps(more)))
    elif more.get("remap_pending") == 1 or more.get("retired_pending") == 1:
        out.append(Problem("gpu_remap_pending", WARNING, SUSPECT, facts=_remaps(more)))
    if reading.throttle is not None and (reading.activity_pm or 0) >= BUSY_PM:
        if reading.throttle & HOT:
            out.append(Problem("gpu_throttled", WARNING, after_s=600, facts={"temp_c": reading.temp_c}))
        elif reading.throttle & POWER_BRAKE:
            out.append(Problem("gpu_power_brake", WARNING, after_s=300))
    out += _link(reading, links_due)
    for name, code in (("fan", "gpu_fan_error"), ("power_mw", "gpu_power_error")):
        if reading.missing.get(name) == "error":
            out.append(Problem(code, WARNING, SUSPECT, after_s=60, facts={"measure": name}))
    if more.get("fan") == 0 and (reading.temp_c or 0) > FAN_DUE_C:
        # A fan that rests on a cool card is at rest; on a warm one it does not turn (P12)
        out.append(Problem("gpu_fan_error", WARNING, SUSPECT, after_s=60, facts={"temp_c": reading.temp_c}))
    if "reset_required" in reading.missing.values():
        out.append(Problem("gpu_reset_required", CRITICAL, FAULT))
    return out


def _grown(more: Mapping[str, int], before: Mapping[str, int], name: str) -> int:
    """How much a counter grew since the last reading; one that fell was begun anew (driver loaded again)."""
    if name not in more:
        return 0
    last = before.get(name)
    if last is None:
        return 0  # the first reading says nothing about when
    return more[name] - last if more[name] >= last else more[name]


def _remaps(more: Mapping[str, int]) -> dict[str, Any]:
    return {name: more[name] for name in ("remap_corr", "remap_uncorr", "retired_pages") if name in more}


def _link(reading: Reading, links_due: int | None) -> Iterable[Problem]:
    more = reading.more
    width, most = more.get("pcie_width"), more.get("pcie_width_max")
    if width is not None and most is not None and width < most:
        yield Problem("gpu_link_width", WARNING, after_s=120, facts={"width": width, "of": most})
    gen, best = more.get("pcie_gen"), more.get("pcie_gen_max")
    # An idle card lowers its link by itself; only at work a low generation is a fault.
    if gen is not None and best is not None and gen < best and (reading.activity_pm or 0) >= BUSY_PM:
        yield Problem("gpu_link_gen", WARNING, after_s=300, facts={"gen": gen, "of": best})
    if reading.links is not None and links_due is not None and reading.links < links_due:
        yield Problem("gpu_nvlink", WARNING, after_s=120, facts={"links": reading.links, "of": links_due})


COUNTERS = ("ecc_uncorr", "ecc_corr", "remap_uncorr", "pcie_replays")


def counters_of(more: Mapping[str, int]) -> dict[str, int]:
    """The counters to compare the next reading with."""
    return {name: more[name] for name in COUNTERS if name in more}


def odd_ones(values: Mapping[int, str], *, least: int = 3) -> dict[int, str]:
    """Members of a group whose value differs from what most of it has: member → the value of most. A group below
    `least`, or without a clear majority, has no odd ones."""
    known = {key: value for key, value in values.items() if value}
    if len(known) < least:
        return {}
    (value, n), *_rest = Counter(sorted(known.values())).most_common(1)
    if 2 * n <= len(known):
        return {}
    return {key: value for key, own in known.items() if own != value}
