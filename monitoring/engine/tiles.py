"""The state of one tile, from what was decided, what was seen and what was measured: one function for all.

Wall, table, node page, API and metrics ask here, so that no two of them differ.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def tile_state(facts: TileFacts, *, at_ms: int, quiet_since_ms: int, now_ms: int) -> str:
    """The one state of a tile.

    `at_ms`: time of the last sample, 0 for none; `quiet_since_ms`: since when it has been quiet, 0 for busy or
    unknown. The strongest fact wins: maintenance, broken, not heard of, being taken back, then who holds it.
    """
    if facts.schedulable == "maintenance":
        return "maintenance"
    if facts.condition == "fault":
        return "fault"
    if facts.condition == "vanished" or facts.health == "lost":
        return "lost"
    if facts.lease == "stopping" or facts.reclaim:
        return "reclaiming"
    if at_ms <= 0 or now_ms - at_ms > NO_DATA_MS:
        return "no_data"
    closed = facts.cordoned or facts.schedulable in ("cordoned", "draining")
    if facts.split:
        return "split"
    if facts.lease:
        if facts.schedulable == "draining":
            return "draining"
        if facts.lease in ("reserved", "starting"):
            return facts.lease
        since = max(quiet_since_ms, facts.held_since_ms)
        return "idle" if quiet_since_ms and now_ms - since >= IDLE_MS else "in_use"
    if closed:
        return "cordoned"
    if "suspect" in (facts.condition, facts.health):
        return "suspect"
    if facts.foreign:
        return "no_lease"
    return "reserved" if facts.reserved else "free"


def is_stale(*, at_ms: int, now_ms: int) -> bool:
    """Older than three missed samples of ten seconds: its last value stays, dimmed, with its time (G090)."""
    return at_ms > 0 and now_ms - at_ms > STALE_MS
