"""Who must agree to an ask: policy data evaluated to ordered steps, with the rules that asked for them.

A policy is a list of rules. A rule has a ``code``, conditions that must all hold (``when``), and either
steps, nobody (an empty list of steps), or a refusal. Rules of kind ``first`` are tried in order and the
first that holds decides; rules of kind ``also`` are all tried after it and add their steps. Steps are
joined in the order lead, administrator, finance, each role once with the shortest time-out asked for. When
no ``first`` rule holds, the ask needs the lead: a policy with a gap never lets work pass by itself.

Rules as data (JSON): ``{"code": "small", "kind": "first", "when": [["amount_milli", "le", 4000]], "steps":
[{"role": "lead", "timeout_hours": 24}]}`` or ``"refuse": true`` in place of ``steps``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

Role = Literal["lead", "admin", "finance"]
Outcome = Literal["auto", "steps", "refused"]
Kind = Literal["first", "also"]

ROLES: tuple[Role, ...] = ("lead", "admin", "finance")
DEFAULT_RULE = "no_rule"
DEFAULT_TIMEOUT_HOURS = 24


class PolicyError(ValueError):
    """The policy data is wrong; ``pointer`` says where (JSON pointer)."""

    def __init__(self, pointer: str, message: str) -> None:
        super().__init__(f"{pointer}: {message}")
        self.pointer = pointer
        self.message = message


@dataclass(frozen=True, slots=True)
class Ask:
    """What the rules may look at. ``duration_ms`` None = no end, ``cost_micro`` None = no price known.

    ``over_guarantee``: used + asked lies above the guarantee on the department's own level; ``over_cap``:
    above a hard cap on any level. ``departments`` are the codes of the department and its ancestors.
    """

    amount_milli: int
    flavour: str
    duration_ms: int | None = None
    cost_micro: int | None = None
    over_guarantee: bool = False
    over_cap: bool = False
    job_class: str = "training"
    interruptible: bool = True
    nodes: int = 1
    departments: tuple[str, ...] = ()

    @property
    def duration_hours(self) -> float | None:
        return None if self.duration_ms is None else self.duration_ms / 3_600_000


@dataclass(frozen=True, slots=True)
class Condition:
    """``field op value``; on a field without a value (no end, no price) only ``none`` and ``ne`` hold, and a
    ``gt``/``ge`` too: what has no end is longer than any number."""

    field: str
    op: str
    value: Any

    def holds(self, ask: Ask) -> bool:
        value = getattr(ask, self.field)
        if self.op == "none":
            return (value is None) is bool(self.value)
        if value is None:
            return self.op in ("gt", "ge", "ne")
        return bool(_OPERATORS[self.op](value, self.value))


@dataclass(frozen=True, slots=True)
class StepRule:
    role: Role
    timeout_hours: int = DEFAULT_TIMEOUT_HOURS


@dataclass(frozen=True, slots=True)
class Rule:
    code: str
    kind: Kind = "first"
    when: tuple[Condition, ...] = ()
    steps: tuple[StepRule, ...] = ()
    refuse: bool = False

    def holds(self, ask: Ask) -> bool:
        return all(condition.holds(ask) for condition in self.when)


@dataclass(frozen=True, slots=True)
class Step:
    """One agreement to get, in order from 1; ``rule`` is the code of the first rule that asked for it."""

    order: int
    role: Role
    timeout_hours: int
    rule: str


@dataclass(frozen=True, slots=True)
class ApprovalPlan:
    """``matched`` are the codes of all rules that held, in order. ``steps`` is empty unless outcome is
    ``steps``.
    """

    outcome: Outcome
    steps: tuple[Step, ...]
    matched: tuple[str, ...]


def evaluate(rules: Sequence[Rule], ask: Ask) -> ApprovalPlan:
    """The steps that one ask needs under a policy."""
    base = next((rule for rule in rules if rule.kind == "first" and rule.holds(ask)), None)
    if base is not None and base.refuse:
        return ApprovalPlan("refused", (), (base.code,))
    first = base or Rule(DEFAULT_RULE, steps=(StepRule("lead"),))
    matched = [first, *(rule for rule in rules if rule.kind == "also" and rule.holds(ask))]
    refusing = next((rule for rule in matched if rule.refuse), None)
    codes = tuple(rule.code for rule in matched)
    if refusing is not None:
        return ApprovalPlan("refused", (), codes)
    found: dict[Role, tuple[int, str]] = {}
    for rule in matched:
        for step in rule.steps:
            hours, code = found.get(step.role, (step.timeout_hours, rule.code))
            found[step.role] = (min(hours, step.timeout_hours), code)
    ordered = [role for role in ROLES if role in found]
    steps = tuple(Step(n, role, *found[role]) for n, role in enumerate(ordered, 1))
    return ApprovalPlan("steps" if steps else "auto", steps, codes)


def dearest(asks: Iterable[Ask]) -> Ask:
    """Of one ask resolved to several flavours, the one approval judges: highest cost, then largest, then
    first.

    An ask without a known price counts as dearer than any price. ValueError when there is none.
    """
    return max(
        asks, key=lambda ask: (ask.cost_micro is None, ask.cost_micro or 0, ask.over_cap, ask.amount_milli)
    )


def parse_policy(data: Any) -> tuple[Rule, ...]:
    """Rules from their JSON form. PolicyError with a JSON pointer for anything that is not understood."""
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise PolicyError("", "wanted a list of rules")
    rules = tuple(_parse_rule(row, f"/{index}") for index, row in enumerate(data))
    codes = [rule.code for rule in rules]
    for index, code in enumerate(codes):
        if code in codes[:index] or code == DEFAULT_RULE:
            raise PolicyError(f"/{index}/code", f"{code!r} is taken")
    return rules


def _parse_rule(row: Any, at: str) -> Rule:
    if not isinstance(row, Mapping):
        raise PolicyError(at, "wanted an object")
    unknown = set(row) - {"code", "kind", "when", "steps", "refuse"}
    if unknown:
        raise PolicyError(f"{at}/{sorted(unknown)[0]}", "unknown key")
    code, kind, refuse = row.get("code"), row.get("kind", "first"), row.get("refuse", False)
    if not isinstance(code, str) or not code:
        raise PolicyError(f"{at}/code", "wanted a name")
    if kind not in ("first", "also"):
        raise PolicyError(f"{at}/kind", "wanted first or also")
    if not isinstance(refuse, bool):
        raise PolicyError(f"{at}/refuse", "wanted true or false")
    when = tuple(_parse_condition(c, f"{at}/when/{i}") for i, c in enumerate(row.get("when", ())))
    steps = tuple(_parse_step(s, f"{at}/steps/{i}") for i, s in enumerate(row.get("steps", ())))
    if refuse and steps:
        raise PolicyError(f"{at}/steps", "a refusing rule has no steps")
    return Rule(code, cast(Kind, kind), when, steps, refuse)


def _parse_condition(row: Any, at: str) -> Condition:
    if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 3:
        raise PolicyError(at, "wanted [field, operator, value]")
    field, op, value = row
    if field not in _FIELDS:
        raise PolicyError(f"{at}/0", f"unknown field {field!r}")
    if op not in _OPERATORS and op != "none":
        raise PolicyError(f"{at}/1", f"unknown operator {op!r}")
    numeric = field in _NUMERIC and op in ("lt", "le", "gt", "ge", "eq", "ne")
    if numeric and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise PolicyError(f"{at}/2", "wanted a number")
    if op in ("in", "not_in"):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise PolicyError(f"{at}/2", "wanted a list")
        value = tuple(value)
    return Condition(field, op, value)


def _parse_step(row: Any, at: str) -> StepRule:
    if not isinstance(row, Mapping) or set(row) - {"role", "timeout_hours"}:
        raise PolicyError(at, "wanted {role, timeout_hours}")
    role, hours = row.get("role"), row.get("timeout_hours", DEFAULT_TIMEOUT_HOURS)
    if role not in ROLES:
        raise PolicyError(f"{at}/role", f"wanted one of {', '.join(ROLES)}")
    if isinstance(hours, bool) or not isinstance(hours, int) or hours <= 0:
        raise PolicyError(f"{at}/timeout_hours", "wanted a positive number of hours")
    return StepRule(cast(Role, role), hours)


def dump_policy(rules: Iterable[Rule]) -> list[dict[str, Any]]:
    """The JSON form of rules; ``parse_policy(dump_policy(rules)) == tuple(rules)``."""
    rows: list[dict[str, Any]] = []
    for rule in rules:
        row: dict[str, Any] = {"code": rule.code, "kind": rule.kind}
        row["when"] = [
            [c.field, c.op, list(c.value) if isinstance(c.value, tuple) else c.value] for c in rule.when
        ]
        if rule.refuse:
            row["refuse"] = True
        else:
            row["steps"] = [{"role": step.role, "timeout_hours": step.timeout_hours} for step in rule.steps]
        rows.append(row)
    return rows


def _contains(value: Any, wanted: Any) -> bool:
    return wanted in value


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "in": lambda value, wanted: value in wanted,
    "not_in": lambda value, wanted: value not in wanted,
    "has": _contains,
}
_NUMERIC = ("amount_milli", "duration_ms", "duration_hours", "cost_micro", "nodes")
_FIELDS = {field.name for field in fields(Ask)} | {"duration_hours"}

DEFAULT_POLICY: list[dict[str, Any]] = [
    {"code": "over-cap", "kind": "first", "when": [["over_cap", "eq", True]], "refuse": True},
    {
        "code": "small-within-guarantee",
        "kind": "first",
        "when": [
            ["over_guarantee", "eq", False],
            ["amount_milli", "le", 4000],
            ["duration_hours", "le", 12],
        ],
        "steps": [],
    },
    {
        "code": "within-guarantee",
        "kind": "first",
        "when": [["over_guarantee", "eq", False]],
        "steps": [{"role": "lead", "timeout_hours": 24}],
    },
    {
        "code": "borrows",
        "kind": "first",
        "when": [["over_guarantee", "eq", True]],
        "steps": [{"role": "lead", "timeout_hours": 24}],
    },
    {
        "code": "cost-5000",
        "kind": "also",
        "when": [["cost_micro", "none", False], ["cost_micro", "gt", 5_000_000_000]],
        "steps": [{"role": "finance", "timeout_hours": 8}],
    },
    {
        "code": "long-lease",
        "kind": "also",
        "when": [["duration_hours", "gt", 168]],
        "steps": [{"role": "admin", "timeout_hours": 24}],
    },
    {
        "code": "service-no-end",
        "kind": "also",
        "when": [["duration_ms", "none", True]],
        "steps": [{"role": "admin", "timeout_hours": 24}],
    },
]
