"""Alert rules over values: who is beyond a threshold, and what becomes of each firing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ABOVE, BELOW = "above", "below"


@dataclass(frozen=True, slots=True)
class Firing:
    """A firing as it is known: pending or open since (ms), and its worst value."""

    pending_ms: int
    opened: bool
    worst: int


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of one subject: `begin` (pending), `open`, `keep`, `end`, with its value and worst value."""

    act: str
    value: int
    worst: int


def beyond(value: float, threshold: int, direction: str) -> bool:
    """Whether a value fires."""
    return value > threshold if direction == ABOVE else value < threshold


def steps(
    values: Mapping[str, float],
    firings: Mapping[str, Firing],
    *,
    threshold: int,
    direction: str,
    for_ms: int,
    now_ms: int,
) -> dict[str, Step]:
    """Subject → what becomes of it. A subject without a value is unknown: a pending one ends, an open one stays
    as it is, for silence is no recovery."""
    out: dict[str, Step] = {}
    for key, value in values.items():
        known = firings.get(key)
        if not beyond(value, threshold, direction):
            if known is not None:
                out[key] = Step("end", round(value), known.worst)
            continue
        worst = round(value) if known is None else _worse(known.worst, round(value), direction)
        since = now_ms if known is None else known.pending_ms
        if known is not None and known.opened:
            out[key] = Step("keep", round(value), worst)
        elif now_ms - since >= for_ms:
            out[key] = Step("open", round(value), worst)
        else:
            out[key] = Step("begin" if known is None else "keep", round(value), worst)
    for key, known in firings.items():
        if key not in values and not known.opened:
            out[key] = Step("end", known.worst, known.worst)
    return out


def _worse(a: int, b: int, direction: str) -> int:
    return max(a, b) if direction == ABOVE else min(a, b)
