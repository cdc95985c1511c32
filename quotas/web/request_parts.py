"""The folded parts of the request form: time, place, several at once. Each lays its fields out, hands over what
was typed as the service takes it, and shows an earlier request's wishes again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, ClassVar

from django import forms
from django.utils import timezone
from django.utils.translation import gettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _

from portal.accounts.policy import Policy
from portal.kernel.clock import now
from quotas.models import CapacityRequest, GpuFlavour, RequestDependency
from quotas.selectors.pool_names import datasets_named, fabrics_of, levels_of, sites_named, storage_of
from quotas.web.forms import ServiceForm, local_input
from quotas.web.words import weekdays

HOURS = forms.NumberInput(attrs={"inputmode": "decimal", "min": "0.1", "step": "any"})
WHOLE = {"inputmode": "numeric", "min": "1", "step": "1"}
MOMENT = {"type": "datetime-local"}
DATASETS_LISTED = 50
ZONES = ["Asia/Shanghai", "UTC", "Europe/Berlin", "America/New_York", "America/Los_Angeles"]


def _number(**attrs: str) -> forms.NumberInput:
    return forms.NumberInput(attrs={**WHOLE, **attrs})


class TimeFields(ServiceForm):
    """When it starts: as soon as possible, in a window, in a window of each week; and its deadline."""

    start = forms.ChoiceField(
        label=_("Start"),
        choices=[
            ("asap", _("As soon as possible")),
            ("window", _("Reserve a window")),
            ("weekly", _("Reserve a window each week")),
        ],
    )
    start_at = forms.CharField(label=_("From"), required=False, widget=forms.TextInput(attrs=MOMENT))
    week_days = forms.MultipleChoiceField(
        label=_("Days"), required=False, widget=forms.CheckboxSelectMultiple, choices=weekdays
    )
    week_from = forms.CharField(
        label=pgettext_lazy("time of day", "From"), widget=forms.TextInput(attrs={"type": "time"})
    )
    week_to = forms.CharField(
        label=pgettext_lazy("time of day", "To"),
        help_text=_("at or before the start: on the next day"),
        widget=forms.TextInput(attrs={"type": "time"}),
    )
    week_first = forms.CharField(label=_("First day"), widget=forms.TextInput(attrs={"type": "date"}))
    week_until = forms.CharField(label=_("Last day"), widget=forms.TextInput(attrs={"type": "date"}))
    week_zone = forms.CharField(
        label=_("Time zone"),
        help_text=_("the hours stay when clocks change"),
        widget=forms.TextInput(attrs={"list": "zones"}),
    )
    deadline_at = forms.CharField(
        label=_("Finished by"),
        required=False,
        help_text=_("told at once where it cannot be"),
        widget=forms.TextInput(attrs=MOMENT),
    )

    NAMES: ClassVar[dict[str, str]] = {
        "window": "week_until",
        "window/days": "week_days",
        "window/from": "week_from",
        "window/to": "week_to",
        "window/first": "week_first",
        "window/until": "week_until",
        "window/zone": "week_zone",
    }

    def time_values(self, service: bool) -> dict[str, Any]:
        """What the service takes of it."""
        t = self.typed
        start = t("start")
        weekly = start == "weekly" and not service
        days = self.data.getlist("week_days") if hasattr(self.data, "getlist") else []
        window = {
            "days": [int(d) for d in days if d.isascii() and d.isdecimal()],
            **{name: t(f"week_{name}") for name in ("from", "to", "zone", "first", "until")},
        }
        return {
            "start_at": self.moment("start_at") if start == "window" else None,
            "deadline_at": None if service or weekly else self.moment("deadline_at"),
            "window": window if weekly else {},
        }

    @staticmethod
    def first() -> dict[str, Any]:
        """What the empty form shows."""
        today = timezone.localtime(now()).date()
        return {
            "start": "asap",
            "week_days": ["0", "1", "2", "3", "4"],
            "week_from": "09:00",
            "week_to": "18:00",
            "week_first": today.isoformat(),
            "week_until": (today + timedelta(days=28)).isoformat(),
            "week_zone": str(timezone.get_current_timezone()),
        }

    @staticmethod
    def initial_time(r: CapacityRequest) -> dict[str, Any]:
        """What an earlier request asked."""
        out: dict[str, Any] = {
            "start": "weekly" if r.window else "window" if r.start_at else "asap",
            "start_at": local_input(r.start_at),
            "deadline_at": local_input(r.deadline_at),
        }
        if r.window:
            out |= {f"week_{name}": r.window[name] for name in ("from", "to", "zone", "first", "until")}
            out["week_days"] = [str(day) for day in r.window["days"]]
        return out


class PlaceFields(ServiceForm):
    """Where it may run."""

    site_code = forms.ChoiceField(label=_("Site"), required=False)
    fabric = forms.ChoiceField(
        label=_("Network between nodes"),
        required=False,
        help_text=_("neither PCIe nor the memory of a card"),
    )
    fabric_gbit_s = forms.CharField(
        label=_("Speed per node, at least"), required=False, widget=_number(min="0")
    )
    storage = forms.ChoiceField(label=_("Storage on the node"), required=False)
    domain_required = forms.ChoiceField(label=_("All nodes in one"), required=False)
    domain_preferred = forms.ChoiceField(label=_("If possible in one"), required=False)
    datasets = forms.CharField(
        label=_("Data sets"),
        required=False,
        help_text=_("codes, with commas between"),
        widget=forms.TextInput(attrs={"list": "datasets", "class": "mono"}),
    )
    stage_datasets = forms.BooleanField(
        label=_("Copy them to the node first where they are not"),
        help_text=_("else only nodes that have them"),
        required=False,
    )
    driver = forms.CharField(
        label=_("Driver, at least"),
        required=False,
        widget=forms.TextInput(attrs={"inputmode": "decimal", "placeholder": "550.54"}),
    )

    NAMES: ClassVar[dict[str, str]] = {}

    def place_choices(self, offered: Iterable[GpuFlavour], policy: Policy) -> None:
        """Only what the pool has is offered."""
        flavours = list(offered)
        anything = [("", gettext("Any"))]
        kinds = dict(CapacityRequest.Fabric.choices)
        levels = dict(CapacityRequest.Level.choices)
        known = levels_of(flavours)
        places = [("", gettext("Anywhere"))] + [
            (key, levels[key]) for key in ("row", "rack", "switch") if key in known
        ]
        self.set_choices("site_code", [*anything, *sites_named().items()])
        self.set_choices(
            "fabric",
            [*anything]
            + [
                (kind, f"{kinds[kind]} ≤ {gbit} Gbit/s" if gbit else str(kinds[kind]))
                for kind, gbit in sorted(fabrics_of(flavours).items())
                if kind in kinds
            ],
        )
        self.set_choices("storage", [*anything, *((kind, kind) for kind in storage_of(flavours))])
        self.set_choices("domain_required", places)
        self.set_choices("domain_preferred", places)
        self.dataset_options = list(datasets_named(policy).values_list("code", "name")[:DATASETS_LISTED])

    def set_choices(self, name: str, options: list[Any]) -> None:
        """Set the options of a choice field; what was typed stays choosable, for the service to judge."""
        field = self.fields[name]
        assert isinstance(field, forms.ChoiceField)
        typed = self.typed(name) if self.is_bound else str(self.initial.get(name) or "")
        if typed and typed not in {value for value, _label in options}:
            options = [*options, (typed, typed)]
        field.choices = options

    def place_values(self) -> dict[str, Any]:
        """What the service takes of it."""
        t = self.typed
        named = t("datasets")
        names = ("site_code", "fabric", "fabric_gbit_s", "storage", "domain_required", "domain_preferred")
        return {
            **{name: t(name) for name in names},
            "datasets": named,
            "stage_datasets": t("stage_datasets") != "" if named else True,
        }

    def driver_value(self) -> dict[str, Any]:
        """The driver as part of the requirement."""
        driver = self.typed("driver")
        return {"driver": driver} if driver else {}

    @staticmethod
    def first() -> dict[str, Any]:
        """What the empty form shows."""
        return {"stage_datasets": True}

    @staticmethod
    def initial_place(r: CapacityRequest) -> dict[str, Any]:
        """What an earlier request asked."""
        names = ("site_code", "fabric", "storage", "domain_required", "domain_preferred", "stage_datasets")
        return {
            **{name: getattr(r, name) for name in names},
            "fabric_gbit_s": r.fabric_gbit_s or "",
            "datasets": ", ".join(r.datasets),
            "driver": r.requirement.get("driver", ""),
        }


class SeriesFields(ServiceForm):
    """Several in one: arrays, elastic gangs, what it waits for, replicas of a service."""

    nodes_min = forms.CharField(
        label=_("Start with at least so many nodes"),
        required=False,
        help_text=_("empty: all or nothing"),
        widget=_number(),
    )
    array_count = forms.CharField(
        label=_("Members of an array"),
        required=False,
        help_text=_("each runs the same with its own GPUPOOL_ARRAY_INDEX, from 0"),
        widget=_number(max="1000"),
    )
    array_at_once = forms.CharField(
        label=_("At once, at most"), required=False, help_text=_("empty: all"), widget=_number(max="1000")
    )
    after = forms.CharField(
        label=_("Wait for"),
        required=False,
        widget=forms.TextInput(attrs={"class": "mono", "placeholder": "R-17, R-18"}),
    )
    after_when = forms.ChoiceField(
        label=_("until it has"), choices=RequestDependency.Kind.choices, required=False
    )
    after_failed = forms.ChoiceField(
        label=_("If it fails"), choices=CapacityRequest.AfterFailed.choices, required=False
    )
    scale_by = forms.ChoiceField(label=_("How many replicas"))
    replicas_min = forms.CharField(label=_("Replicas, at least"), widget=_number(max="256"))
    replicas = forms.CharField(label=_("Replicas, at most"), widget=_number(max="256"))
    signal_per_replica = forms.CharField(
        label=_("One replica carries"),
        help_text=_("of the number that the service reports, for example requests per second"),
        widget=_number(),
    )
    timetable_zone = forms.CharField(
        label=_("Time zone"), required=False, widget=forms.TextInput(attrs={"list": "zones"})
    )
    timetable = forms.CharField(
        label=_("Replicas by day and hour"),
        required=False,
        help_text=_("seven lists of 24 numbers, from Monday"),
        widget=forms.Textarea(attrs={"rows": 7, "class": "mono", "spellcheck": "false"}),
    )
    health_kind = forms.ChoiceField(label=_("Health check"), required=False)
    health_port = forms.CharField(label=_("Port"), required=False, widget=_number(max="65535"))
    health_path = forms.CharField(
        label=_("Path"),
        required=False,
        widget=forms.TextInput(attrs={"class": "mono", "placeholder": "/healthz"}),
    )
    health_command = forms.CharField(
        label=_("Check command"), required=False, widget=forms.TextInput(attrs={"class": "mono"})
    )

    NAMES: ClassVar[dict[str, str]] = {
        "replicas_max": "replicas",
        "timetable/days": "timetable",
        "timetable/zone": "timetable_zone",
        "health": "health_kind",
        "health/kind": "health_kind",
        "health/port": "health_port",
        "health/path": "health_path",
        "health/command": "health_command",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        by, health = self.fields["scale_by"], self.fields["health_kind"]
        assert isinstance(by, forms.ChoiceField) and isinstance(health, forms.ChoiceField)
        by.choices = CapacityRequest.ScaleBy.choices
        health.choices = [
            ("", gettext("None")),
            ("http", "HTTP"),
            ("tcp", "TCP"),
            ("command", gettext("Command")),
        ]

    def series_values(self) -> dict[str, Any]:
        """What the service takes of it for work with an end."""
        names = ("nodes_min", "array_count", "array_at_once", "after", "after_when", "after_failed")
        return {name: self.typed(name) for name in names}

    def service_values(self) -> dict[str, Any]:
        """The same for a service."""
        t = self.typed
        by = t("scale_by") or "fixed"
        kind = t("health_kind")
        health = {name: t(f"health_{name}") for name in ("port", "path", "command") if t(f"health_{name}")}
        return {
            "scale_by": by,
            "replicas_max": t("replicas") or 1,
            "replicas_min": t("replicas_min") or 1 if by == "signal" else t("replicas") or 1,
            "signal_per_replica": t("signal_per_replica") or 1,
            "timetable": {"zone": t("timetable_zone"), "days": _json(t("timetable"))}
            if by == "timetable" and t("timetable")
            else {},
            "health": {"kind": kind, **health} if kind else {},
        }

    @staticmethod
    def first() -> dict[str, Any]:
        """What the empty form shows: four replicas in office hours, one else."""
        office = [4 if 9 <= hour < 18 else 1 for hour in range(24)]
        return {
            "scale_by": "fixed",
            "replicas": 1,
            "replicas_min": 1,
            "signal_per_replica": 100,
            "timetable_zone": str(timezone.get_current_timezone()),
            "timetable": _grid_text([office] * 5 + [[1] * 24] * 2),
            "after_when": "ok",
            "after_failed": "withdraw",
        }

    @staticmethod
    def initial_series(r: CapacityRequest) -> dict[str, Any]:
        """What an earlier request asked; what it waited for has passed."""
        out: dict[str, Any] = {
            "nodes_min": r.nodes_min or "",
            "array_count": r.array_count or "",
            "array_at_once": r.array_at_once or "",
            "after_failed": r.after_failed,
            "scale_by": r.scale_by,
            "replicas": r.replicas_max,
            "replicas_min": r.replicas_min,
            "signal_per_replica": r.signal_per_replica,
            "health_kind": r.health.get("kind", ""),
            **{f"health_{name}": r.health.get(name, "") for name in ("port", "path", "command")},
        }
        if r.timetable:
            out |= {"timetable_zone": r.timetable["zone"], "timetable": _grid_text(r.timetable["days"])}
        if r.state in ("draft", "returned", "in_approval", "needs_consent"):
            deps = list(r.waits_for.select_related("on").order_by("on_id"))
            out["after"] = ", ".join(dep.on.ref for dep in deps)
            out["after_when"] = deps[0].kind if deps else "ok"
        return out


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _grid_text(days: list[list[int]]) -> str:
    return "[" + ",\n ".join(json.dumps(day, separators=(",", ":")) for day in days) + "]"
