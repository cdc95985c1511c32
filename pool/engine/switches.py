"""The switches of a policy as data: kind, bounds and unit of each, so that forms, API and checks share one list.

Times are milliseconds in a policy. A switch that differs from its default is stored; nothing else is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pool.engine.model import Policy
from quotas.engine.flavours import FlavourPolicy

Kind = Literal["flag", "number", "choice", "weights"]
Unit = Literal["", "ms", "permille"]
HOUR = 3_600_000
DAY = 24 * HOUR
CLASSES = ("training", "inference", "interactive")


@dataclass(frozen=True, slots=True)
class Switch:
    """One switch. ``low`` and ``high`` bound numbers and weights; ``choices`` are the codes of a choice."""

    name: str
    group: str
    kind: Kind
    low: int = 0
    high: int = 0
    unit: Unit = ""
    choices: tuple[str, ...] = ()


SWITCHES: tuple[Switch, ...] = (
    Switch("order", "order", "choice", choices=("guarantee", "tournament")),
    Switch("queueing", "order", "choice", choices=("best_effort", "strict")),
    Switch("user_decay", "order", "flag"),
    Switch("class_weights", "order", "weights", 0, 100),
    Switch("scarcity", "place", "flag"),
    Switch("consolidate", "place", "flag"),
    Switch(
        "preference", "place", "choice", choices=("borrowing_over_preemption", "preemption_over_borrowing")
    ),
    Switch("when_can_borrow", "place", "choice", choices=("next", "stop")),
    Switch("when_can_preempt", "place", "choice", choices=("next", "stop")),
    Switch("max_reservations", "promise", "number", 0, 100),
    Switch("overdue_ms", "promise", "number", 0, DAY, "ms"),
    Switch("windows_ahead_ms", "promise", "number", 0, 366 * DAY, "ms"),
    Switch("window_lead_ms", "promise", "number", 0, DAY, "ms"),
    Switch("reclaim", "take", "flag"),
    Switch("reclaim_patience_ms", "take", "number", 0, 3_600_000, "ms"),
    Switch("preempt", "take", "flag"),
    Switch("preempt_equal", "take", "flag"),
    Switch("rebalance", "take", "flag"),
    Switch("min_run_preempt_ms", "take", "number", 0, 30 * DAY, "ms"),
    Switch("min_run_reclaim_ms", "take", "number", 0, 30 * DAY, "ms"),
    Switch("max_victims", "take", "number", 1, 10_000),
    Switch("max_preemptors", "take", "number", 0, 10_000),
    Switch("max_searches", "take", "number", 0, 100_000),
    Switch("keep_for_preemptor_ms", "take", "number", 60_000, DAY, "ms"),
    Switch("displace_margin_permille", "guard", "number", 0, 10_000, "permille"),
    Switch("evictions_back_off", "guard", "number", 1, 100),
    Switch("back_off_ms", "guard", "number", 0, 30 * DAY, "ms"),
    Switch("estimate_slack_permille", "tell", "number", 0, 10_000, "permille"),
    Switch("estimate_min_slack_ms", "tell", "number", 0, DAY, "ms"),
    Switch("nodes_told", "tell", "number", 0, 100),
)
BY_NAME = {one.name: one for one in SWITCHES}
GROUPS = ("order", "place", "promise", "take", "guard", "tell")
OF_FLAVOUR = tuple(one.name for one in fields(FlavourPolicy))


class SwitchError(ValueError):
    """A value that a switch does not take: ``code`` is unknown_switch, not_a_flag, not_a_number, out_of_bounds,
    not_a_choice or not_weights.
    """

    def __init__(self, name: str, code: str) -> None:
        super().__init__(f"{name}: {code}")
        self.name, self.code = name, code


def default_of(name: str) -> Any:
    """The value of a switch in the built-in policy."""
    value = getattr(FlavourPolicy(), name) if name in OF_FLAVOUR else getattr(Policy(), name)
    return dict(value) if isinstance(value, Mapping) else value


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` checked one by one, without what is the default; raises SwitchError at the first that is wrong."""
    found: dict[str, Any] = {}
    for name in sorted(values):
        switch = BY_NAME.get(name)
        if switch is None:
            raise SwitchError(name, "unknown_switch")
        code = _problem(switch, values[name])
        if code:
            raise SwitchError(name, code)
        if values[name] != default_of(name):
            found[name] = values[name]
    return found


def _problem(switch: Switch, value: Any) -> str:
    match switch.kind:
        case "flag":
            return "" if isinstance(value, bool) else "not_a_flag"
        case "choice":
            return "" if value in switch.choices else "not_a_choice"
        case "number":
            return _number_problem(switch, value)
        case "weights":
            if not isinstance(value, Mapping) or not set(value) <= set(CLASSES):
                return "not_weights"
            return next((code for one in value.values() if (code := _number_problem(switch, one))), "")


def _number_problem(switch: Switch, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return "not_a_number"
    return "" if switch.low <= value <= switch.high else "out_of_bounds"
