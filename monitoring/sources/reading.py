"""One shape for all that is fetched: a reading of one card or MIG instance, in the units of messages. Pure.

Percent, MiB, °C, mW, MHz, mJ, KiB/s, as `monitoring.engine.measures` names them: sources convert at their edge (pitfall
P31), and each measure has a value or a coded reason. Identity is the card's UUID, and the GPU instance below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from monitoring.engine.measures import CARD_ONLY, MEASURES, value_or_reason
from monitoring.engine.samples import Sample, memory_sane, parse_processes, take_extras

UNKNOWN_PROCESSES = "processes"


@dataclass(slots=True)
class Metric:
    """One series of an exposition. `value` is None where its text is no number."""

    name: str
    labels: dict[str, str]
    value: float | None
    at_ms: int | None = None


@dataclass(slots=True)
class Reading:
    """What one fetch says of one card (`instance` None) or one MIG instance. `at_ms` None: the time of the fetch."""

    gpu_uuid: str
    instance: int | None = None
    profile: str = ""
    at_ms: int | None = None
    values: dict[str, float | None] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    model: str = ""
    index: int | None = None
    hosts: set[str] = field(default_factory=set)
    workloads: list[dict[str, str]] = field(default_factory=list)
    processes: list[dict[str, Any]] | None = None
    xid: int | None = None
    xid_counts: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Scrape:
    """All readings of one fetch, by (UUID, instance), and what was wrong with it, by code."""

    readings: dict[tuple[str, int | None], Reading] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)
    driver: str = ""


def sample_of(reading: Reading, *, at_ms: int, source: str, total_mib: int | None = None) -> Sample:
    """The sample of a reading, through the same checks as an agent's row.

    `total_mib` is what the inventory knows, for sources that tell only used and free memory of slices. Processes
    that the source does not tell are unknown, which is not the same as none.
    """
    slice_row = reading.instance is not None
    sample = Sample(gpu_uuid=reading.gpu_uuid, mig_uuid="", at_ms=reading.at_ms or at_ms, source=source)
    values: Mapping[str, Any] = reading.values
    for measure in MEASURES:
        if slice_row and measure.name in CARD_ONLY:
            sample.missing[measure.name] = "card_level"
            continue
        if measure.name in values:
            value, reason = value_or_reason(measure, values[measure.name])
        else:
            value, reason = None, reading.missing.get(measure.name, "not_reported")
        if value is None:
            sample.missing[measure.name] = reason
        else:
            setattr(sample, measure.column, value)
    take_extras(sample, values, reading.missing, of_slice=slice_row)
    if sample.mem_total_mib is None and total_mib:
        sample.mem_total_mib = total_mib
        sample.missing.pop("mem_total", None)
    memory_sane(sample)
    if len(reading.workloads) > 1:
        sample.more["shared"] = len(reading.workloads)
    if reading.processes is None:
        sample.missing[UNKNOWN_PROCESSES] = "not_reported"
    else:
        sample.processes = parse_processes(reading.processes)
    return sample
