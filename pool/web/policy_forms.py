"""The scheduler's policy as a form: one field a switch, times in seconds, shares in percent."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from pool.engine.switches import BY_NAME, CLASSES, GROUPS, SWITCHES, Switch, default_of
from pool.models import SchedulingPolicy
from quotas.web.forms import ServiceForm

GROUP_WORDS = {
    "order": _("Who comes first"),
    "place": _("Where and as what it is placed"),
    "promise": _("Promises to those who are blocked"),
    "take": _("Taking back and displacing"),
    "guard": _("Against going back and forth"),
    "tell": _("What is told to those who wait"),
}
WORDS: dict[str, tuple[Any, Any]] = {
    "order": (_("Order of departments"), _("Guarantee: below guarantee first, then use against share.")),
    "queueing": (_("Queueing"), _("Strict: nobody passes the first of a line who waits for a place.")),
    "user_decay": (
        _("People who used less come first"),
        _("Within a department, by use that fades with time."),
    ),
    "scarcity": (
        _("Spare scarce models"),
        _("A wish without a model does not take one that others are tied to."),
    ),
    "consolidate": (_("Move work to make room"), _("Only work that can be started again from a checkpoint.")),
    "preference": (_("Borrow or displace"), _("Which comes first where several flavours would do.")),
    "when_can_borrow": (_("When a flavour can be borrowed"), ""),
    "when_can_preempt": (_("When a flavour can be had by displacing"), ""),
    "max_reservations": (_("Promises at once"), _("So many blocked requests have their places kept.")),
    "overdue_ms": (_("Overdue work counts as free after"), ""),
    "windows_ahead_ms": (_("Reserved windows are kept so long ahead"), ""),
    "window_lead_ms": (
        _("Borrowers leave so long before a reserved window"),
        _("Longer than their notice, or the window begins late."),
    ),
    "reclaim": (_("Owners take back their guarantee"), ""),
    "reclaim_patience_ms": (
        _("Owners wait so long for a card that comes free by itself"),
        _("Asks for one card at most; then others give way."),
    ),
    "preempt": (_("More important work displaces"), _("Within a department, strictly higher priority only.")),
    "preempt_equal": (_("Also equal priority displaces"), ""),
    "rebalance": (_("Borrowers displace each other"), _("For fairness between those above their guarantee.")),
    "min_run_preempt_ms": (_("Left alone after its start, from displacing"), ""),
    "min_run_reclaim_ms": (_("Left alone after its start, from owners"), ""),
    "max_victims": (_("Most victims for one request"), ""),
    "max_preemptors": (_("Most requests that room is made for in one decision"), ""),
    "max_searches": (_("Most searches for room in one decision"), ""),
    "keep_for_preemptor_ms": (_("Freed places are kept for"), ""),
    "displace_margin_permille": (_("Margin to displace in turn"), ""),
    "evictions_back_off": (_("Rests after so many displacements"), ""),
    "back_off_ms": (_("Length of the rest"), ""),
    "estimate_slack_permille": (_("Width of a start range"), _("As a share of the wait.")),
    "estimate_min_slack_ms": (_("Width of a start range at least"), ""),
    "nodes_told": (_("Nodes named in a reason"), ""),
}
CHOICE_WORDS = {
    "guarantee": _("by guarantee and share"),
    "tournament": _("by tournament over the tree"),
    "best_effort": _("best effort"),
    "strict": _("strict"),
    "borrowing_over_preemption": _("rather borrow"),
    "preemption_over_borrowing": _("rather displace"),
    "next": pgettext_lazy("flavour", "look at the next one too"),
    "stop": pgettext_lazy("flavour", "take it"),
}
CLASS_WORDS = {
    "training": _("Weight of training"),
    "inference": _("Weight of inference"),
    "interactive": _("Weight of interactive work"),
}


class PolicyForm(ServiceForm):
    """Name, note and all switches."""

    name = forms.CharField(label=_("Name"), widget=forms.TextInput(attrs={"maxlength": "80"}))
    note = forms.CharField(
        label=_("Note"), required=False, widget=forms.TextInput(attrs={"maxlength": "500"})
    )

    def __init__(self, data: Any = None, *, values: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(data, **kwargs)
        for switch in SWITCHES:
            if switch.kind == "weights":
                weights = values.get(switch.name) or {}
                for one in CLASSES:
                    self._number(f"{switch.name}_{one}", CLASS_WORDS[one], "", weights.get(one, ""))
                continue
            label, help_text = WORDS[switch.name]
            value = values.get(switch.name, default_of(switch.name))
            if switch.kind == "flag":
                self.fields[switch.name] = forms.BooleanField(
                    label=label, help_text=help_text, required=False, initial=value
                )
            elif switch.kind == "choice":
                self.fields[switch.name] = forms.ChoiceField(
                    label=label,
                    help_text=help_text,
                    choices=[(one, CHOICE_WORDS[one]) for one in switch.choices],
                    initial=value,
                )
            else:
                self._number(switch.name, label, help_text, _shown(switch, value))

    def _number(self, name: str, label: Any, help_text: Any, value: Any) -> None:
        self.fields[name] = forms.CharField(
            label=label,
            help_text=help_text,
            initial=value,
            required=False,
            widget=forms.TextInput(attrs={"inputmode": "decimal"}),
        )

    def values(self) -> dict[str, Any]:
        """The switches as typed, in the units of the policy; what is no number stays for the service to refuse."""
        found: dict[str, Any] = {}
        for switch in SWITCHES:
            if switch.kind == "flag":
                found[switch.name] = bool(self.typed(switch.name))
            elif switch.kind == "weights":
                typed = {one: self.typed(f"{switch.name}_{one}") for one in CLASSES}
                found[switch.name] = {
                    one: _read(BY_NAME[switch.name], text) for one, text in typed.items() if text
                }
            elif switch.kind == "choice":
                found[switch.name] = self.typed(switch.name)
            else:
                found[switch.name] = _read(switch, self.typed(switch.name))
        return found

    def sections(self) -> list[tuple[Any, list[tuple[Any, Any]]]]:
        """Headings with their fields and units, in order."""
        return [
            (
                GROUP_WORDS[group],
                [pair for one in SWITCHES if one.group == group for pair in self._pairs(one)],
            )
            for group in GROUPS
        ]

    def _pairs(self, switch: Switch) -> list[tuple[Any, Any]]:
        if switch.kind == "weights":
            return [(self[f"{switch.name}_{one}"], "") for one in CLASSES]
        unit = {"ms": _("seconds"), "permille": "%", "": ""}[switch.unit]
        return [(self[switch.name], unit)]


def _shown(switch: Switch, value: Any) -> str:
    if switch.unit == "ms":
        return f"{value / 1000:g}"
    return f"{value / 10:g}" if switch.unit == "permille" else str(value)


def _read(switch: Switch, text: str) -> Any:
    factor = {"ms": 1000, "permille": 10, "": 1}[switch.unit]
    try:
        number = float(text) * factor
    except ValueError:
        return text
    return int(number) if number == int(number) else text


def differing(policy: SchedulingPolicy | None) -> list[tuple[Any, Any, Any]]:
    """What a version has otherwise than the defaults: label, its value, the default."""
    rows = []
    for name, value in (policy.values if policy is not None else {}).items():
        switch = BY_NAME.get(name)
        if switch is None:
            rows.append((name, value, ""))
        elif switch.kind == "weights":
            rows += [(CLASS_WORDS[one], weight, 1) for one, weight in value.items()]
        else:
            rows.append((WORDS[name][0], _said(switch, value), _said(switch, default_of(name))))
    return rows


def _said(switch: Switch, value: Any) -> Any:
    if switch.kind == "flag":
        return _("yes") if value else _("no")
    if switch.kind == "choice":
        return CHOICE_WORDS.get(value, value)
    unit = {"ms": " s", "permille": " %", "": ""}[switch.unit]
    return f"{_shown(switch, value)}{unit}"
