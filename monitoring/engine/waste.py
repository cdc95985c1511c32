"""Whether held GPUs are wasted, and how much: rules over what telemetry summed, each with its evidence.

Pure. Activity is in per mille, memory in MiB, time in seconds, amounts of GPU in milli-GPU (`waste_milli`: how much
of a card is wasted while the finding holds). SM activity and busy time are never mixed: each card says which of the
two its figures are (`basis`). Too little telemetry gives no finding: what is unknown is never waste.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from portal.kernel.units import MILLI_PER_GPU

IDLE, OVER_ASKED, DATA, THROTTLED, NO_LEASE, STRANDED = (
    "idle",
    "over_asked",
    "waiting_data",
    "throttled",
    "no_lease",
    "stranded",
)
KINDS = (IDLE, OVER_ASKED, DATA, THROTTLED, NO_LEASE, STRANDED)
HIGH, MEDIUM, LOW = "high", "medium", "low"

# Bits of NVML's clock event reasons (nvml.h, nvmlClocksEventReason*)
POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80
HOT = HW_SLOWDOWN | SW_THERMAL | HW_THERMAL


@dataclass(frozen=True, slots=True)
class Rules:
    """Every number of the findings."""

    quiet_pm: int = 50
    """Below this activity an hour counts as quiet (the same 5 % as idleness)."""
    coverage: float = 0.8
    """Least share of the window with telemetry; below it nothing is concluded."""
    sure_coverage: float = 0.95
    window_s: int = 7 * 86_400
    asked_least_s: int = 24 * 3600
    """Held for so long at least before the amount asked for is judged."""
    memory_room: float = 1.2
    """A smaller part must hold the highest memory seen times this …"""
    compute_room: float = 1.3
    """… and the activity that 95 % of the hours stay below times this."""
    part_most_milli: int = 600
    """Only a part that saves at least 40 % of the card is worth a proposal."""
    flavour_least_saving: float = 0.2
    """Another flavour is worth a proposal where it saves a fifth of the money."""
    wait_least_looks: int = 60
    wait_share: float = 0.3
    low_pm: int = 500
    iowait_pm: int = 150
    cpu_pm: int = 900
    throttle_least_looks: int = 30
    throttle_share: float = 0.1
    capped_loss: float = 0.1
    """A power cap is how cards run at full load: only a loss of clock of a tenth is a finding."""
    unusable_milli: int = 100


@dataclass(frozen=True, slots=True)
class CardUse:
    """What one card (or slice) of an allocation did in the full hours that it was held within the window."""

    label: str
    charge: int
    held_s: int
    covered_s: int
    quiet_s: int
    p95_pm: int | None
    peak_pm: int | None
    basis: str
    memory_peak_mib: int | None
    memory_mib: int

    @property
    def coverage(self) -> float:
        """Share of its time with telemetry."""
        return self.covered_s / self.held_s if self.held_s else 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """A smaller thing that could be asked for instead: a MIG profile or a fraction."""

    name: str
    milli: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A flavour of whole cards at its price (micro-currency a GPU-hour)."""

    name: str
    memory_mib: int
    price: int


@dataclass(slots=True)
class Tally:
    """Counts of looks at one card while it was held: at each look the card, its clock and its host were seen.

    `*_clock` are sums of MHz over the looks with and without throttling, so that the loss can be told.
    """

    looks: int = 0
    low: int = 0
    io: int = 0
    cpu: int = 0
    pcie: int = 0
    activity_pm: int = 0
    busy: int = 0
    hot: int = 0
    brake: int = 0
    capped: int = 0
    slow_n: int = 0
    slow_clock: int = 0
    free_n: int = 0
    free_clock: int = 0
    temp_max: int | None = None

    def add(self, other: Tally) -> None:
        """Sum another one into this."""
        for name in self.__slots__:
            if name != "temp_max":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.temp_max is not None:
            self.temp_max = max(self.temp_max or other.temp_max, other.temp_max)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a busy or quiet card: activity, throttle reasons, SM clock, its host's load."""

    activity_pm: int | None
    throttle: int | None
    clock_mhz: int | None
    temp_c: int | None
    cpu_pm: int | None
    iowait_pm: int | None
    pcie_full: bool | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """One finding. `evidence` holds plain figures; words are made where it is read."""

    kind: str
    rule: str
    waste_milli: int
    confidence: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


def tally_of(look: Look, rules: Rules) -> Tally:
    """One look as counts. A missing measure counts neither way."""
    out = Tally(looks=1, temp_max=look.temp_c)
    if look.activity_pm is not None:
        out.activity_pm = look.activity_pm
        if rules.quiet_pm <= look.activity_pm < rules.low_pm:
            out.low = 1
            # One cause a look, the slowest first: a disk that waits also keeps a CPU from work.
            if look.iowait_pm is not None and look.iowait_pm >= rules.iowait_pm:
                out.io = 1
            elif look.pcie_full:
                out.pcie = 1
            elif look.cpu_pm is not None and look.cpu_pm >= rules.cpu_pm:
                out.cpu = 1
    if look.throttle is not None and look.activity_pm is not None and look.activity_pm >= rules.quiet_pm:
        out.busy = 1
        out.hot = int(bool(look.throttle & HOT))
        out.brake = int(not out.hot and bool(look.throttle & POWER_BRAKE))
        out.capped = int(not out.hot and not out.brake and bool(look.throttle & POWER_CAP))
        if look.clock_mhz is not None and (out.hot or out.brake or out.capped):
            out.slow_n, out.slow_clock = 1, look.clock_mhz
        elif look.clock_mhz is not None:
            out.free_n, out.free_clock = 1, look.clock_mhz
    return out


def confidence_of(coverage: float, rules: Rules) -> str:
    """How much the figures rest on: high from 95 % coverage on, low below 80 %."""
    if coverage >= rules.sure_coverage:
        return HIGH
    return MEDIUM if coverage >= rules.coverage else LOW


def over_asked(
    cards: Sequence[CardUse],
    parts: Iterable[Part],
    rules: Rules,
    *,
    price: int = 0,
    offers: Iterable[Offer] = (),
) -> Found | None:
    """More cards than ever worked, or whole cards where a part or a cheaper flavour would do. Whole cards only.

    Cards that never worked are the strongest finding: they need no proposal that might be wrong. Of a part and another
    flavour the one that saves more is proposed. `price` is that of the cards held, `offers` what could stand in for
    them; without prices none is proposed.
    """
    judged = [card for card in cards if card.charge == MILLI_PER_GPU]
    if not judged or len(judged) < len(cards):
        return None
    held = min(card.held_s for card in judged)
    coverage = min(card.coverage for card in judged)
    if held < rules.asked_least_s or coverage < rules.coverage:
        return None
    known = [card for card in judged if card.peak_pm is not None]
    if len(known) < len(judged):
        return None
    spare = [card for card in known if (card.peak_pm or 0) < rules.quiet_pm]
    base: dict[str, Any] = {
        "cards": len(judged),
        "hours": held // 3600,
        "coverage_pm": int(1000 * coverage),
        "basis": "sm" if all(card.basis == "sm" for card in judged) else "busy",
    }
    confidence = confidence_of(coverage, rules)
    if spare and len(spare) < len(known):
        evidence = {**base, "unused": len(spare), "which": [card.label for card in spare][:16]}
        return Found(OVER_ASKED, "count", MILLI_PER_GPU * len(spare), confidence, evidence)
    if spare:
        return None  # none worked at all: that is idleness, not a wrong amount
    part = _part(known, parts, base, confidence, rules)
    other = _flavour(known, price, offers, base, confidence, rules)
    if part is not None and other is not None:
        return other if other.waste_milli > part.waste_milli else part
    return part or other


def _flavour(
    cards: Sequence[CardUse],
    price: int,
    offers: Iterable[Offer],
    base: dict[str, Any],
    confidence: str,
    rules: Rules,
) -> Found | None:
    """A cheaper flavour that would hold the highest memory with room, and would do the work also if it were as much
    slower as it is cheaper.

    How fast a model is for this work nobody knows here. Prices stand in for it: cheaper cards mostly give more for
    their money, so that the true speed lies above. Wasted is the share of the price that would be saved.
    """
    peaks = [card.memory_peak_mib for card in cards]
    if not price or any(peak is None for peak in peaks) or any(card.p95_pm is None for card in cards):
        return None
    peak = max(peak for peak in peaks if peak is not None)
    level = max(card.p95_pm or 0 for card in cards)
    fits = [
        offer
        for offer in offers
        if 0 < offer.price <= price * (1 - rules.flavour_least_saving)
        and offer.memory_mib >= peak * rules.memory_room
        and level * rules.compute_room * price <= MILLI_PER_GPU * offer.price
    ]
    if not fits:
        return None
    best = min(fits, key=lambda offer: (offer.price, offer.memory_mib, offer.name))
    evidence = {
        **base,
        "memory_peak_mib": peak,
        "memory_mib": max(card.memory_mib for card in cards),
        "p95_pm": level,
        "flavour": best.name,
        "flavour_mib": best.memory_mib,
        "price": price,
        "flavour_price": best.price,
        "level_there_pm": min(MILLI_PER_GPU, level * price // best.price),
    }
    # Another model is a guess at best; one that rests on busy time, which only bounds the need from above, is less.
    sure = MEDIUM if base["basis"] == "sm" and confidence != LOW else LOW
    milli = MILLI_PER_GPU * (price - best.price) // price
    return Found(OVER_ASKED, "flavour", milli * len(cards), sure, evidence)


def _part(
    cards: Sequence[CardUse], parts: Iterable[Part], base: dict[str, Any], confidence: str, rules: Rules
) -> Found | None:
    peaks = [card.memory_peak_mib for card in cards]
    if any(peak is None for peak in peaks) or any(card.p95_pm is None for card in cards):
        return None
    peak = max(peak for peak in peaks if peak is not None)
    level = max(card.p95_pm or 0 for card in cards)
    fits = [
        part
        for part in parts
        if part.milli <= rules.part_most_milli
        and part.memory_mib >= peak * rules.memory_room
        and part.milli >= level * rules.compute_room
    ]
    if not fits:
        return None
    best = min(fits, key=lambda part: (part.milli, part.memory_mib, part.name))
    # Busy time only bounds how much of the card is needed from above: a kernel may fill a corner of it.
    if base["basis"] != "sm" and confidence == HIGH:
        confidence = MEDIUM
    evidence = {
        **base,
        "memory_peak_mib": peak,
        "memory_mib": max(card.memory_mib for card in cards),
        "p95_pm": level,
        "part": best.name,
        "part_milli": best.milli,
    }
    return Found(OVER_ASKED, "part", (MILLI_PER_GPU - best.milli) * len(cards), confidence, evidence)


def waiting_for_data(charge: int, tally: Tally, rules: Rules) -> Found | None:
    """GPU low while the host waits for input, its CPU is full, or the bus is: the GPU is not what limits.

    Wasted is the share of those looks times what the card did not do in them.
    """
    causes = {"io": tally.io, "pcie": tally.pcie, "cpu": tally.cpu}
    waits = sum(causes.values())
    if tally.looks < rules.wait_least_looks or waits < rules.wait_share * tally.looks:
        return None
    rule = max(causes, key=lambda name: (causes[name], name))
    activity = tally.activity_pm // tally.looks
    milli = charge * waits * (1000 - min(1000, activity)) // (tally.looks * 1000)
    evidence = {"looks": tally.looks, "waits": waits, **causes, "activity_pm": activity}
    return Found(DATA, rule, milli, HIGH if tally.looks >= 4 * rules.wait_least_looks else MEDIUM, evidence)


def throttled(charge: int, tally: Tally, rules: Rules) -> Found | None:
    """Clocks held down by heat, by the power supply, or by a power cap that costs a tenth or more."""
    slow = {"heat": tally.hot, "power_brake": tally.brake, "power_cap": tally.capped}
    if tally.busy < rules.throttle_least_looks:
        return None
    rule = "heat" if tally.hot else "power_brake" if tally.brake else "power_cap"
    share = (slow[rule] if rule != "heat" else tally.hot + tally.brake) / tally.busy
    if share < rules.throttle_share:
        return None
    loss = _clock_loss(tally)
    if rule == "power_cap" and (loss is None or loss < 1000 * rules.capped_loss):
        return None
    evidence = {
        "looks": tally.busy,
        "share_pm": int(1000 * share),
        "loss_pm": loss,
        "clock_mhz": tally.slow_clock // tally.slow_n if tally.slow_n else None,
        "free_clock_mhz": tally.free_clock // tally.free_n if tally.free_n else None,
        "temp_max_c": tally.temp_max,
    }
    # Without an unhindered clock to compare with, the loss is not known and no GPU-hours are claimed.
    milli = int(charge * share * (loss or 0)) // 1000
    return Found(THROTTLED, rule, milli, HIGH if loss is not None else LOW, evidence)


def _clock_loss(tally: Tally) -> int | None:
    """Per mille of the unhindered clock that is missing while throttled; None where one of the two was not seen."""
    if not tally.slow_n or not tally.free_n:
        return None
    slow, free = tally.slow_clock / tally.slow_n, tally.free_clock / tally.free_n
    return max(0, round(1000 * (1 - slow / free))) if free else None


def unusable_rest(used_milli: int, rules: Rules) -> int:
    """Milli-GPU that is left on a shared card and too small for anybody."""
    rest = MILLI_PER_GPU - used_milli
    return rest if used_milli and 0 < rest < rules.unusable_milli else 0


def fractions_of(memory_mib: int) -> list[Part]:
    """Fractions in tenths of a card, for cards that cannot be split."""
    return [Part(f"{tenth * 100}", tenth * 100, memory_mib * tenth // 10) for tenth in range(1, 10)]


def wasted_ms(waste_milli: int, start_ms: int, end_ms: int) -> int:
    """GPU-milliseconds wasted in [start, end)."""
    return waste_milli * max(0, end_ms - start_ms) // MILLI_PER_GPU


def share_between(total: int, start_ms: int, end_ms: int, cuts: Sequence[int]) -> list[int]:
    """Split a total evenly over [start, end) at the cuts (ascending, within): parts that sum to the total exactly."""
    edges = [start_ms, *cuts, end_ms]
    length = max(1, end_ms - start_ms)
    marks = [total * (edge - start_ms) // length for edge in edges]
    return [b - a for a, b in zip(marks, marks[1:], strict=False)]
