"""From one row of an agent's message to one sample: every measure is a value or a coded reason why not.

Stored units: activity in per mille, memory in MiB, temperature in °C, power in mW, clocks in MHz. A value that
is not a number, is a library's "blank" number, or cannot be true of any card is refused by itself and the others
are kept (behaviours P065, P066); a row whose identity or time cannot be trusted is refused whole. N/A is never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from monitoring.engine.measures import CARD_ONLY, EXTRAS, MEASURES, Measure, reason_code, value_or_reason
from portal.kernel.units import to_ms

ACCEPT_FUTURE_MS = 60_000
_OF_SLICES = frozenset({"tensor", "dram", "mem_free", "shared", "settling"})
_ABSENT = object()


def _whole(measure: Measure) -> tuple[int, int]:
    """The whole numbers in the unit of messages that can be true: nearly every value is one, and judged by this."""
    return -(-measure.low // measure.scale), measure.high // measure.scale


# (name, column, lowest and highest whole number, measure, whether slices have it only from their card)
_COLUMNS = tuple((m.name, m.column, *_whole(m), m, m.name in CARD_ONLY) for m in MEASURES)
_WHOLE_EXTRAS = {name: (*_whole(m), m.scale) for name, m in EXTRAS.items()}


class RowRefused(ValueError):
    """The whole row is refused; `code` says why: bad_row, bad_uuid, bad_time, future, too_old."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class Sample:
    """One instant of one card (`mig_uuid` empty) or one MIG slice. A measure of None has its reason in `missing`."""

    gpu_uuid: str
    mig_uuid: str
    at_ms: int
    util_pm: int | None = None
    sm_pm: int | None = None
    mem_used_mib: int | None = None
    mem_total_mib: int | None = None
    mem_reserved_mib: int | None = None
    temp_c: int | None = None
    power_mw: int | None = None
    sm_clock_mhz: int | None = None
    throttle: int | None = None
    missing: dict[str, str] = field(default_factory=dict)
    more: dict[str, int] = field(default_factory=dict)
    source: str = "agent"
    processes: list[dict[str, Any]] = field(default_factory=list)


def parse_row(row: Any, *, now_ms: int, oldest_ms: int, lean: bool = False) -> Sample:
    """A sample from `[gpu_uuid, mig_uuid|null, iso_time, values, missing, processes]`.

    Raises `RowRefused` where identity or time is not to be trusted: a time more than a minute ahead of the
    installation (a clock that runs wrong, 2038) or older than `oldest_ms` (its day is no longer kept). `lean`: the row
    is not its card's last in the message, so what only the last state keeps is left out; all that the history and the
    judgement of `activity` rest on is there.
    """
    if type(row) is not list and (not isinstance(row, Sequence) or isinstance(row, str)) or len(row) < 5:
        raise RowRefused("bad_row")
    gpu_uuid, mig_uuid, at, values, missing = row[:5]
    processes = row[5] if len(row) > 5 else []
    if not isinstance(gpu_uuid, str) or not 4 <= len(gpu_uuid) <= 80 or not isinstance(mig_uuid, str | None):
        raise RowRefused("bad_uuid")
    if not (type(values) is dict is type(missing)) and not (
        isinstance(values, Mapping) and isinstance(missing, Mapping)
    ):
        raise RowRefused("bad_row")
    at_ms = parse_time(at)
    if at_ms > now_ms + ACCEPT_FUTURE_MS:
        raise RowRefused("future")
    if at_ms < oldest_ms:
        raise RowRefused("too_old")
    sample = Sample(gpu_uuid=gpu_uuid, mig_uuid=(mig_uuid or "")[:120], at_ms=at_ms)
    for name, column, low, high, measure, of_card in _COLUMNS:
        if mig_uuid and of_card:
            # Boards repeat these for every slice (pitfall P04): they count once per card.
            sample.missing[name] = "card_level"
            continue
        raw = values.get(name, _ABSENT)
        if type(raw) is int and low <= raw <= high:
            setattr(sample, column, raw * measure.scale)
            continue
        if raw is not _ABSENT:
            value, reason = value_or_reason(measure, raw)
        else:
            value, reason = None, reason_code(missing.get(name, "not_reported"))
        if value is None:
            sample.missing[name] = reason
        else:
            setattr(sample, column, value)
    if lean:
        values = {"settling": values["settling"]} if "settling" in values else {}
        missing = {"processes": missing["processes"]} if "processes" in missing else {}
    take_extras(sample, values, missing, of_slice=bool(mig_uuid))
    memory_sane(sample)
    sample.processes = parse_processes(processes)
    return sample


SKEW_STEP_MS = 10_000
SKEW_LEAST_MS = 5_000
LIVE_MS = 30_000


def skew_to_take_off(skew_ms: int, newest_ms: int | None, now_ms: int) -> int:
    """Milliseconds by which a message's times are ahead, in whole steps of ten seconds.

    `skew_ms` is what the node's greeting showed, `newest_ms` the newest time in the message. Steps, so that a message
    that comes twice gets the same times although greetings differ by the way they took. A message whose times are
    right as they are is from after the clock was set, and stays as it is.
    """
    if abs(skew_ms) < SKEW_LEAST_MS or (newest_ms is not None and abs(newest_ms - now_ms) <= LIVE_MS):
        return 0
    return round(skew_ms / SKEW_STEP_MS) * SKEW_STEP_MS


def parse_time(raw: Any) -> int:
    """Milliseconds since 1970 of an ISO 8601 time with its zone; `RowRefused("bad_time")` otherwise."""
    if not isinstance(raw, str) or len(raw) > 40:
        raise RowRefused("bad_time")
    return _parsed_time(raw)


@lru_cache(maxsize=1024)  # the cards of a message share their moments
def _parsed_time(raw: str) -> int:
    try:
        moment = datetime.fromisoformat(raw)
        if moment.tzinfo is None:
            raise ValueError("no zone")
        return to_ms(moment.astimezone(UTC))
    except (ValueError, OverflowError) as error:
        raise RowRefused("bad_time") from error


def take_extras(
    sample: Sample, values: Mapping[str, Any], missing: Mapping[str, Any], *, of_slice: bool
) -> None:
    """Further measures into `sample.more`; a reason only where the source tells one. Unknown names are left out.

    Processes that could not be read are unknown, which is not the same as none (pitfall P20).
    """
    if "processes" in missing:
        sample.missing["processes"] = reason_code(missing["processes"])
    more = sample.more
    for name, raw in values.items():
        whole = _WHOLE_EXTRAS.get(name)
        if whole is None or (of_slice and name not in _OF_SLICES):
            continue
        if type(raw) is int and whole[0] <= raw <= whole[1]:
            more[name] = raw * whole[2]
            continue
        value, reason = value_or_reason(EXTRAS[name], raw)
        if value is None:
            sample.missing[name] = reason
        else:
            more[name] = value
    for name, raw in missing.items():
        if name in EXTRAS and name not in sample.more and not of_slice:
            sample.missing[name] = reason_code(raw)


def memory_sane(sample: Sample) -> None:
    """More used than there is cannot be true; the reserve is what total, used and free leave (P05)."""
    used, total, free = sample.mem_used_mib, sample.mem_total_mib, sample.more.pop("mem_free", None)
    derivable = sample.mem_reserved_mib is None and free is not None
    if derivable and used is not None and total is not None and used + (free or 0) <= total:
        sample.mem_reserved_mib = total - used - (free or 0)
        sample.missing.pop("mem_reserved", None)
    if used is not None and total is not None and used > total + total // 50:
        sample.mem_used_mib = None
        sample.missing["mem_used"] = "out_of_range"


def parse_processes(raw: Any) -> list[dict[str, Any]]:
    """At most 64 processes by pid, name, user and memory; arguments and environment never pass (P20)."""
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        return []
    out = []
    for entry in raw[:64]:
        if type(entry) is not dict and not isinstance(entry, Mapping):
            continue
        pid, memory = entry.get("pid"), entry.get("mem_mib")
        if isinstance(pid, bool) or not isinstance(pid, int) or not 0 < pid < 2**31:
            continue
        sane = isinstance(memory, int | float) and not isinstance(memory, bool) and 0 <= memory <= 2_097_152
        clean: dict[str, Any] = {
            "pid": pid,
            # What a program calls itself may hold its arguments: the first word's last path part only.
            "name": _name(entry.get("name")),
            "user": str(entry.get("user") or "")[:64],
            "mem_mib": int(memory) if sane and memory is not None else None,
        }
        share = entry.get("sm")
        if isinstance(share, int) and not isinstance(share, bool) and 0 <= share <= 100:
            clean["sm"] = share  # percent of the SMs' time, where the driver keeps it by process
        if isinstance(entry.get("allocation"), str):
            clean["allocation"] = entry["allocation"][:36]
        out.append(clean)
    return out


def _name(raw: Any) -> str:
    words = str(raw or "").replace("\x00", " ").split()
    return words[0].rsplit("/", 1)[-1][:64] if words else ""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Load of a node's host: per mille of processor time, MiB."""

    cpu_pm: int | None
    mem_used_mib: int | None
    iowait_pm: int | None


def parse_host(raw: Any) -> HostLoad | None:
    """The `host` part of a samples message, or None where there is nothing to keep."""
    if not isinstance(raw, Mapping) or not raw:
        return None
    percent, memory = Measure("cpu", "", 10, 0, 1000), Measure("mem", "", 1, 0, 2**31 - 1)
    return HostLoad(
        value_or_reason(percent, raw.get("cpu"))[0],
        value_or_reason(memory, raw.get("mem_used_mib"))[0],
        value_or_reason(percent, raw.get("iowait"))[0],
    )


QUIET, BUSY, UNKNOWN = 1, 0, 2
_ACTIVE_PM = 50
_SMALL_MEMORY_MIB = 1024


def activity(sample: Sample) -> int:
    """Whether the card did work at this instant: BUSY, QUIET, or UNKNOWN where it cannot be told.

    Quiet needs two signals: activity below 5 % *and* no kernel running or no process. Missing activity is
    unknown, never quiet (P063), and so is the first minute of a driver, whose start looks like work (pitfall P02).
    A busy counter latched at 100 % (pitfall P33, behaviour G126) does not make a card busy that has no process and
    holds no memory.
    """
    level = sample.sm_pm if sample.sm_pm is not None else sample.util_pm
    if level is None or sample.more.get("settling"):
        return UNKNOWN
    unseen = "processes" in sample.missing
    if level < _ACTIVE_PM:
        if sample.util_pm == 0 or not (sample.processes or unseen):
            return QUIET
        return UNKNOWN if unseen else BUSY
    return QUIET if latched(sample) else BUSY


def latched(sample: Sample) -> bool:
    """A busy counter that stands at 100 % with nothing on the card: a reset is due, not work."""
    return (
        sample.util_pm is not None
        and sample.util_pm >= 990
        and (sample.sm_pm is None or sample.sm_pm < _ACTIVE_PM)
        and not sample.processes
        and "processes" not in sample.missing
        and sample.mem_used_mib is not None
        and sample.mem_used_mib <= _SMALL_MEMORY_MIB
    )
