"""Forms of maintenance windows, modes and the rules of taking back."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from pool.models import DepartmentMode, Node, Site
from quotas.web.forms import ServiceForm

MOMENT = {"type": "datetime-local"}
WHOLE = {"inputmode": "numeric"}
HOURS = {"inputmode": "decimal"}


class WindowForm(ServiceForm):
    """A maintenance window: what, where, when, and how long before people are told."""

    title = forms.CharField(label=_("Title"), widget=forms.TextInput(attrs={"maxlength": "120"}))
    site = forms.ChoiceField(label=_("Whole site"), required=False)
    nodes = forms.MultipleChoiceField(
        label=_("Or these nodes"), required=False, widget=forms.SelectMultiple(attrs={"size": "8"})
    )
    starts_at = forms.CharField(label=_("From"), widget=forms.TextInput(attrs=MOMENT))
    ends_at = forms.CharField(
        label=pgettext_lazy("maintenance", "Until"), widget=forms.TextInput(attrs=MOMENT)
    )
    notice_h = forms.CharField(
        label=pgettext_lazy("reclaim", "Notice"),
        help_text=_("Work that would run into it is told so long before, saved, and put back in line."),
        widget=forms.TextInput(attrs={"inputmode": "decimal"}),
    )
    reason = forms.CharField(
        label=_("Reason"),
        help_text=_("People with work there read it."),
        widget=forms.Textarea(attrs={"rows": 2, "maxlength": "1000"}),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._set("site", [("", "–"), *[(site.code, site.name) for site in Site.objects.all()]])
        self._set("nodes", [(str(node.uid), node.name) for node in pickable_nodes()])

    def _set(self, name: str, options: list[tuple[str, str]]) -> None:
        field = self.fields[name]
        assert isinstance(field, forms.ChoiceField)
        field.choices = options

    def picked(self) -> list[str]:
        """The chosen nodes' uids."""
        return [str(uid) for uid in self.data.getlist("nodes")]  # type: ignore[attr-defined]


def pickable_nodes() -> list[Node]:
    """Nodes that a window may name."""
    return list(
        Node.objects.exclude(schedulable=Node.Schedulable.RETIRED).only("uid", "name").order_by("name")[:500]
    )


class ModeForm(ServiceForm):
    """How far taking back acts in one department."""

    mode = forms.ChoiceField(
        label=_("Mode"),
        choices=[("", _("as the department above")), *DepartmentMode.Mode.choices],
        required=False,
        widget=forms.RadioSelect,
    )
    willing = forms.BooleanField(label=_("It takes part while in roll-out"), required=False)
    min_run_preempt_s = forms.CharField(
        label=_("Left alone after its start, from displacing"),
        help_text=_("Hours; empty: as the department above."),
        required=False,
        widget=forms.TextInput(attrs=HOURS),
    )
    min_run_reclaim_s = forms.CharField(
        label=_("Left alone after its start, from owners"),
        help_text=_("Hours; empty: as the department above."),
        required=False,
        widget=forms.TextInput(attrs=HOURS),
    )
    reason = forms.CharField(label=_("Reason"), widget=forms.TextInput(attrs={"maxlength": "500"}))


class RulesForm(ServiceForm):
    """The numbers of taking back; minutes and hours for people, seconds for the rules."""

    grace_preempted_s = forms.CharField(
        label=_("Grace where an owner waits"), widget=forms.TextInput(attrs=WHOLE)
    )
    grace_idle_s = forms.CharField(label=_("Grace for idle work"), widget=forms.TextInput(attrs=WHOLE))
    grace_over_quota_s = forms.CharField(label=_("Notice over quota"), widget=forms.TextInput(attrs=WHOLE))
    checkpoint_s = forms.CharField(
        label=_("Checkpoint, where the request does not say"), widget=forms.TextInput(attrs=WHOLE)
    )
    checkpoint_most_s = forms.CharField(label=_("Checkpoint at most"), widget=forms.TextInput(attrs=WHOLE))
    idle_window_s = forms.CharField(label=_("Idle counts after"), widget=forms.TextInput(attrs=WHOLE))
    idle_warn_s = forms.CharField(
        label=_("From the warning to the notice"), widget=forms.TextInput(attrs=WHOLE)
    )
    idle_everybody = forms.BooleanField(label=_("Also work within its guarantee"), required=False)
    still_needed_times = forms.CharField(
        label=_("“Still needed”, times"), widget=forms.TextInput(attrs=WHOLE)
    )
    still_needed_s = forms.CharField(label=_("“Still needed” holds for"), widget=forms.TextInput(attrs=WHOLE))
    evictions_alert = forms.CharField(
        label=_("Alert after displacements a day"), widget=forms.TextInput(attrs=WHOLE)
    )
    reason = forms.CharField(label=_("Reason"), widget=forms.TextInput(attrs={"maxlength": "500"}))

    def values(self) -> dict[str, Any]:
        """What was typed; what is no number stays text, for the service to refuse."""
        found: dict[str, Any] = {}
        for name in self.fields:
            if name in ("reason", "idle_everybody"):
                continue
            text = self.typed(name)
            found[name] = int(text) if text.isdecimal() and len(text) < 10 else text
        found["idle_everybody"] = bool(self.typed("idle_everybody"))
        return found
