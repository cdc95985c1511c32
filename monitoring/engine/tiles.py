"""The state of one tile, from what was decided, what was seen and what was measured: one function for all.

Wall, table, node page, API and metrics ask here, so that no two of them differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Order is the code of a state in frames (version 1): only ever append.
STATES: tuple[str, ...] = (
    "no_data",
    "free",
    "in_use",
    "idle",
    "starting",
    "reserved",
    "reclaiming",
    "draining",
    "cordoned",
    "maintenance",
    "fault",
    "lost",
    "split",
    "no_lease",
    "suspect",
)
CODE: dict[str, int] = {name: code for code, name in enumerate(STATES)}

NO_DATA_MS = 60_000
STALE_MS = 30_000
IDLE_MS = 600_000

HELD = frozenset({"in_use", "idle", "starting", "reserved", "reclaiming", "draining"})
DOWN = frozenset({"fault", "lost"})


@dataclass(slots=True)
class TileFacts:
    """What the database says of a card or slice. `lease`: state of the allocation that holds it, "" for none."""

    condition: str = "ok"
    cordoned: bool = False
    health: str = "unknown"
    schedulable: str = "open"
    lease: str = ""
    reclaim: bool = False
    reserved: bool = False
    split: bool = False
    foreign: bool = False
    held_since_ms: int = 0


NONE = 255
"""No strong state: what follows depends on samples."""


def settled(facts: TileFacts) -> tuple[int, int]:
    """What facts alone decide: (strong state or `NONE`, the state where nothing is strong and data is fresh).

    The strongest fact wins: maintenance, broken, not heard of, being taken back; then, with fresh data, who holds it.
    A weak state of `in_use` becomes `idle` with time.
    """
    if facts.schedulable == "maintenance":
        return CODE["maintenance"], NONE
    if facts.condition == "fault":
        return CODE["fault"], NONE
    if facts.condition == "vanished" or facts.health == "lost":
        return CODE["lost"], NONE
    if facts.lease == "stopping" or facts.reclaim:
        return CODE["reclaiming"], NONE
    return NONE, CODE[_weak(facts)]


def _weak(facts: TileFacts) -> str:
    if facts.split:
        return "split"
    if facts.lease:
        if facts.schedulable == "draining":
            return "draining"
        return facts.lease if facts.lease in ("reserved", "starting") else "in_use"
    if facts.cordoned or facts.schedulable in ("cordoned", "draining"):
        return "cordoned"
    if "suspect" in (facts.condition, facts.health):
        return "suspect"
    if facts.foreign:
        return "no_lease"
    return "reserved" if facts.reserved else "free"


def states_at(
    *,
    strong: npt.NDArray[np.uint8],
    weak: npt.NDArray[np.uint8],
    held_since_ms: npt.NDArray[np.int64],
    at_ms: npt.NDArray[np.int64],
    quiet_since_ms: npt.NDArray[np.int64],
    now_ms: int,
) -> npt.NDArray[np.uint8]:
    """The states of many tiles at once, from `settled` and their samples (times in ms, 0 for none)."""
    silent = (at_ms <= 0) | (now_ms - at_ms > NO_DATA_MS)
    since = np.maximum(quiet_since_ms, held_since_ms)
    idle = (weak == CODE["in_use"]) & (quiet_since_ms != 0) & (now_ms - since >= IDLE_MS)
    state = np.where(idle, np.uint8(CODE["idle"]), weak)
    state = np.where(silent, np.uint8(CODE["no_data"]), state)
    return np.where(strong != NONE, strong, state).astype(np.uint8)


def tile_state(facts: TileFacts, *, at_ms: int, quiet_since_ms: int, now_ms: int) -> str:
    """The one state of a tile.

    `at_ms`: time of the last sample, 0 for none; `quiet_since_ms`: since when it has been quiet, 0 for busy or
    unknown.
    """
    strong, weak = settled(facts)
    if strong != NONE:
        return STATES[strong]
    if at_ms <= 0 or now_ms - at_ms > NO_DATA_MS:
        return "no_data"
    since = max(quiet_since_ms, facts.held_since_ms)
    if STATES[weak] == "in_use" and quiet_since_ms and now_ms - since >= IDLE_MS:
        return "idle"
    return STATES[weak]


def is_silent(*, state: str, at_ms: int, now_ms: int) -> bool:
    """Nothing measures it now: whatever was measured last is no value any more, also of a card in maintenance or
    broken."""
    return state == "lost" or at_ms <= 0 or now_ms - at_ms > NO_DATA_MS


def is_stale(*, at_ms: int, now_ms: int) -> bool:
    """Older than three missed samples of ten seconds: its last value stays, dimmed, with its time (G090)."""
    return at_ms > 0 and now_ms - at_ms > STALE_MS
