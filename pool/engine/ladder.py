"""The reclaim ladder as arithmetic: what its rules are, when each step of a case is due, which idle or
surplus work it begins with.

notice ── grace ──▶ checkpoint hook ── until it is done ──▶ stop ──▶ seen free ──▶ granted again

Moments are milliseconds since 1970, spans seconds unless the name says otherwise. Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

MS = 1000
HookKind = Literal["", "signal", "command", "url"]


@dataclass(frozen=True, slots=True)
class Rules:
    """Every number of taking back. ``RULE_BOUNDS`` says what each may be."""

    grace_preempted_s: int = 60
    """Between telling the holder and the stop, where an owner or a higher priority waits."""
    grace_idle_s: int = 600
    grace_over_quota_s: int = 86_400
    checkpoint_s: int = 30
    """What a checkpoint hook gets where the request does not say how long it needs."""
    checkpoint_most_s: int = 3600
    idle_window_s: int = 3600
    """So long both signals must have been quiet without a hole in the data."""
    idle_warn_s: int = 1800
    """Between the warning and the notice: time for “still needed”."""
    idle_everybody: bool = False
    """Also work within its department's guarantee; by default only what is borrowed."""
    still_needed_times: int = 3
    still_needed_s: int = 14_400
    evictions_alert: int = 3
    """So often one request may be displaced within a day before people are told."""


RULE_BOUNDS: Mapping[str, tuple[int, int]] = {
    "grace_preempted_s": (0, 86_400),
    "grace_idle_s": (0, 86_400),
    "grace_over_quota_s": (0, 30 * 86_400),
    "checkpoint_s": (1, 3600),
    "checkpoint_most_s": (1, 86_400),
    "idle_window_s": (300, 30 * 86_400),
    "idle_warn_s": (60, 7 * 86_400),
    "still_needed_times": (0, 100),
    "still_needed_s": (600, 7 * 86_400),
    "evictions_alert": (1, 100),
}
"""Smallest and largest value of each number. An idle window is thirty samples of ten seconds at least."""


class RuleError(ValueError):
    """A value that the rules do not allow: ``name`` of the rule, smallest and largest value (None: a switch)."""

    def __init__(self, name: str, low: int | None = None, high: int | None = None) -> None:
        super().__init__(name)
        self.name, self.low, self.high = name, low, high


def rules_of(values: Mapping[str, Any]) -> Rules:
    """Rules from stored values; what is missing has its default, unknown names are left aside.

    Raises RuleError for a value out of its bounds.
    """
    known = {field.name for field in fields(Rules)}
    chosen = {name: value for name, value in values.items() if name in known}
    for name, value in chosen.items():
        if name == "idle_everybody":
            if not isinstance(value, bool):
                raise RuleError(name)
            continue
        low, high = RULE_BOUNDS[name]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise RuleError(name, low, high)
    return Rules(**chosen)


@dataclass(frozen=True, slots=True)
class Hook:
    """How work is told to save itself before it is stopped, and how many seconds that takes."""

    kind: HookKind
    seconds: int


NO_HOOK = Hook("", 0)


def hook_of(checkpoint: Mapping[str, Any] | None, rules: Rules) -> Hook:
    """The hook of a request's checkpoint settings: a URL or a command where named, else its signal."""
    settings = checkpoint or {}
    kind = next((name for name in ("url", "command", "signal") if settings.get(name)), "")
    if not kind:
        return NO_HOOK
    asked = settings.get("seconds")
    seconds = (
        int(asked) if isinstance(asked, int | float) and not isinstance(asked, bool) else rules.checkpoint_s
    )
    return Hook(kind, max(1, min(rules.checkpoint_most_s, seconds)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Times:
    """When a case's hook is due and when the stop is."""

    hook_at: int
    stop_at: int


def times(*, at: int, grace_s: int, hook: Hook) -> Times:
    """The times of a case noticed at ``at``: at least ``grace_s``, and never less than its hook needs.

    The hook is called as late as the grace allows, so that little is computed twice.
    """
    stop_at = at + max(grace_s, hook.seconds) * MS
    return Times(stop_at - hook.seconds * MS, stop_at)


@dataclass(frozen=True, slots=True)
class CaseFacts:
    """What decides the next step of an open case."""

    step: Literal["notice", "checkpoint", "stopping"]
    hook: HookKind
    hook_at: int
    stop_at: int
    checkpoint_done: bool = False


Act = Literal["hook", "stop"]


def next_act(case: CaseFacts, now: int) -> Act | None:
    """What is due for a case at ``now``: its hook, its stop, or nothing yet.

    A hook is never skipped, however late: work that nobody asked to save itself is not stopped.
    """
    if case.step == "notice" and case.hook:
        return "hook" if now >= case.hook_at else None
    if case.step in ("notice", "checkpoint") and (case.checkpoint_done or now >= case.stop_at):
        return "stop"
    return None


# -- whom idleness and a lowered quota touch -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """A running allocation as these choices see it. ``since``: of its idleness, or its last start."""

    allocation_id: int
    charge_milli: int
    since: int
    priority: int = 50
    interruptible: bool = True


def idle_within_borrowed(idle: Iterable[Holder], borrowed_milli: int) -> tuple[int, ...]:
    """Of a department's idle work, what its borrowing covers: longest idle first, until that much is found.

    The last one may reach into the guarantee: half an allocation cannot be taken back.
    """
    taken: list[int] = []
    for holder in sorted(idle, key=lambda one: (one.since, one.allocation_id)):
        if borrowed_milli <= 0:
            break
        taken.append(holder.allocation_id)
        borrowed_milli -= holder.charge_milli
    return tuple(taken)


def surplus_victims(running: Sequence[Holder], over_milli: int) -> tuple[int, ...]:
    """What to take back so that ``over_milli`` less is used: interruptible work, lowest priority first, then
    newest start, then larger id; then whatever is not needed is put back, in reverse order.

    All interruptible work where even that does not reach.
    """
    if over_milli <= 0:
        return ()
    order = sorted(
        (one for one in running if one.interruptible),
        key=lambda one: (one.priority, -one.since, -one.allocation_id),
    )
    chosen: list[Holder] = []
    freed = 0
    for one in order:
        if freed >= over_milli:
            break
        chosen.append(one)
        freed += one.charge_milli
    for one in reversed(list(chosen)):
        if freed - one.charge_milli >= over_milli:
            chosen.remove(one)
            freed -= one.charge_milli
    return tuple(one.allocation_id for one in chosen)
