"""What an XID asks for: its own effect, and the stronger one when it repeats under different owners."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# From the weakest to the strongest; the order decides within a burst (one fault is logged as several codes).
STRENGTH = (
    "ignore",
    "log_only",
    "restart_app",
    "watch",
    "ticket",
    "reset_when_idle",
    "restart_then_drain",
    "drain_gpu",
    "drain_node",
)
BURST_S = 60
RECOVERY = {
    0: "ignore",
    1: "drain_gpu",
    2: "drain_node",
    3: "drain_gpu",
    4: "drain_gpu",
    5: "ticket",
    6: "drain_gpu",
    7: "drain_node",
}


def effect_of(entry: dict[str, Any] | None, *, data: dict[str, Any], repeated: bool, owners: int) -> str:
    """The effect of one event. `entry`: the catalogue's; None for a code that it does not have (a person looks).

    `repeated`: the same code on the same card within a day; `owners`: under how many different allocations. A code
    that blames the program escalates to the card once it came under two owners (BEHAVIOUR 6).
    """
    if entry is None:
        return "ticket"
    effect = str(entry["effect"])
    if effect == "recovery":
        action = data.get("recovery_action")
        return RECOVERY.get(action, "drain_gpu") if isinstance(action, int) else "drain_gpu"
    if effect == "restart_app" and owners >= 2:
        return "drain_gpu"
    if effect == "restart_then_drain":
        return "drain_gpu" if repeated else "restart_app"
    if effect == "log_only" and repeated:
        return "watch"
    return effect


def strongest(effects: Iterable[str]) -> str:
    """The strongest effect of a burst; `ignore` of an empty one."""
    return max(effects, key=STRENGTH.index, default="ignore")
