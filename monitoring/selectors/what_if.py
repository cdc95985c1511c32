"""Who sees which what-ifs, and an answer as rows to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.models import Q, QuerySet
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from monitoring.models import Scenario
from portal.accounts.policy import Policy
from portal.kernel.errors import NotFound
from portal.kernel.tables import COUNT, HOURS, MONEY, PERCENT, SECONDS

Text = str | Promise


def may_look(policy: Policy) -> bool:
    """An answer shows waits and money of everybody: those who read all books."""
    return policy.reads_money.everything


def scenarios_for(policy: Policy) -> QuerySet[Scenario]:
    """Their own and the shared ones, newest first, without the answers."""
    if not may_look(policy):
        return Scenario.objects.none()
    return (
        Scenario.objects.filter(Q(owner=policy.user) | Q(shared=True), removed_at=None)
        .select_related("owner")
        .defer("result", "jobs", "quotas")
        .order_by("-id")
    )


def scenario_for(policy: Policy, uid: UUID) -> Scenario:
    """One of them with its answer. NotFound for one that is not theirs to see."""
    found = scenarios_for(policy).filter(uid=uid).defer("jobs", "quotas").first()
    if found is None:
        raise NotFound(code="not_found", detail=_("There is no such what-if."))
    return found


@dataclass(frozen=True)
class Row:
    """A figure of all sides: raw values of a column kind (tables.*); `good` tells which way is better: -1 less, 1 more,
    0 neither."""

    key: str
    label: Text
    basis: Text
    kind: str
    values: tuple[int | None, ...]
    good: int = 0

    @property
    def difference(self) -> int | None:
        """The last against the one before: B − A."""
        a, b = self.values[-2:]
        return None if a is None or b is None else b - a

    @property
    def tone(self) -> str:
        """good, bad, or nothing to say."""
        change = (self.difference or 0) * self.good
        return "good" if change > 0 else "bad" if change < 0 else ""


SIDES = ("recorded", "a", "b")


def sides_of(result: Mapping[str, Any]) -> list[str]:
    """The sides that an answer has, in their order."""
    return [side for side in SIDES if side in result]


def _flavour_sum(side: Mapping[str, Any], name: str) -> int:
    return sum(int(one[name]) for one in side["flavours"].values())


def _seconds(value: int | None) -> int | None:
    return None if value is None else value // 1000


def _used(side: Mapping[str, Any]) -> int | None:
    installed = _flavour_sum(side, "installed")
    return 10_000 * _flavour_sum(side, "held") // installed if installed else None


def comparison(result: Mapping[str, Any]) -> list[Row]:
    """The whole at a glance."""
    found = [result[side] for side in sides_of(result)]

    def row(key: str, label: Text, basis: Text, kind: str, make: Any, good: int = 0) -> Row:
        return Row(key, label, basis, kind, tuple(make(side) for side in found), good)

    return [
        row("started", _("Started"), _("of those who came in the period"), COUNT, lambda s: s["started"], 1),
        row(
            "p50",
            _("Median wait"),
            _("in line until the first start"),
            SECONDS,
            lambda s: _seconds(s["p50"]),
            -1,
        ),
        row("p90", _("Wait of nine in ten"), _("at most"), SECONDS, lambda s: _seconds(s["p90"]), -1),
        row("longest", _("Longest wait"), "", SECONDS, lambda s: _seconds(s["longest"]), -1),
        row("used", _("Allocated"), _("% of what is installed"), PERCENT, _used, 1),
        row("held", _("Allocated"), _("GPU·h"), HOURS, lambda s: _flavour_sum(s, "held")),
        row(
            "idle",
            pgettext_lazy("hours", "Idle"),
            _("GPU·h held, as large a part as each piece of work was seen to idle"),
            HOURS,
            lambda s: s.get("idle"),
            -1,
        ),
        row(
            "idle_wanted",
            _("Idle while wanted"),
            _("GPU·h free while somebody waited whom they would do"),
            HOURS,
            lambda s: _flavour_sum(s, "idle_wanted"),
            -1,
        ),
        row(
            "shortfall",
            _("Shortfall"),
            _("GPU·h below a guarantee that was asked for"),
            HOURS,
            lambda s: _flavour_sum(s, "shortfall"),
            -1,
        ),
        row(
            "borrowed",
            _("Borrowed"),
            _("GPU·h above the guarantees"),
            HOURS,
            lambda s: _flavour_sum(s, "borrowed"),
        ),
        row(
            "reclaimed",
            _("Taken back by owners"),
            _("runs"),
            COUNT,
            lambda s: s["taken"].get("reclaim", 0),
            -1,
        ),
        row(
            "preempted",
            _("Displaced otherwise"),
            _("runs, for more important or fairer work"),
            COUNT,
            lambda s: sum(n for cause, n in s["taken"].items() if cause != "reclaim"),
            -1,
        ),
        row(
            "lost",
            _("Work since the last start"),
            _("GPU·h of runs taken back; a checkpoint saves of it"),
            HOURS,
            lambda s: s["lost"],
            -1,
        ),
        row("cost", _("Cost"), "", MONEY, lambda s: s["cost"]),
    ]


def by_department(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Departments and flavours with the figures of A and B, the largest asks first."""
    sides = {
        side: {(g["department"], g["flavour"]): g for g in result[side]["groups"]} for side in ("a", "b")
    }
    keys = sorted(set(sides["a"]) | set(sides["b"]))
    rows = []
    for key in keys:
        a, b = sides["a"].get(key), sides["b"].get(key)
        waits = [_seconds(one["p50"]) if one else None for one in (a, b)]
        rows.append(
            {
                "department": key[0],
                "name": key[0].rpartition(" / ")[2],
                "flavour": key[1],
                "a": a,
                "b": b,
                "asked": max(one["asked"] if one else 0 for one in (a, b)),
                "p50": waits,
                "p90": [_seconds(one["p90"]) if one else None for one in (a, b)],
                "change": None if None in waits else waits[1] - waits[0],  # type: ignore[operator]
            }
        )
    rows.sort(key=lambda row: (-row["asked"], row["department"], row["flavour"]))
    return rows
