"""Sample values for the living design page (``/design/``): every component in every state, invented figures."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

from django import forms
from django.core.paginator import Paginator
from django.http import HttpRequest
from django.utils.translation import gettext as _

from portal.kernel import clock
from portal.web import icons, states


class SampleForm(forms.Form):
    """One field of each kind, some with an error."""

    duration = forms.IntegerField(initial=12, label="", help_text="")
    gpus = forms.IntegerField()
    cost_centre = forms.ChoiceField(required=False)
    purpose = forms.CharField(widget=forms.Textarea(attrs={"rows": 2}))
    kind = forms.ChoiceField(widget=forms.RadioSelect)
    interruptible = forms.BooleanField(required=False, initial=True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        words = {
            "duration": (_("Duration"), _("Longest lease here: 168 h.")),
            "gpus": (_("GPUs"), ""),
            "cost_centre": (_("Cost centre"), ""),
            "purpose": (_("Purpose"), _("One sentence for those who approve.")),
            "kind": (_("Kind of work"), ""),
            "interruptible": (_("May be interrupted"), _("30 min notice, then checkpoint")),
        }
        for name, (label, text) in words.items():
            self.fields[name].label, self.fields[name].help_text = label, text
        self.fields["cost_centre"].choices = [("", "VM-1420-8"), ("b", "VM-1420-9")]  # type: ignore[attr-defined]
        kinds = [("training", _("Training")), ("inference", _("Inference")), ("hold", _("Interactive"))]
        self.fields["kind"].choices = kinds  # type: ignore[attr-defined]

    def clean_gpus(self) -> int:
        """Refuses more than ten, with the sum."""
        if self.cleaned_data["gpus"] > 10:
            raise forms.ValidationError(_("Over the limit by 6: 22 used + 16 asked > 32. At most 10 now."))
        return int(self.cleaned_data["gpus"])


def _chart(now: dt.datetime) -> dict[str, Any]:
    times = [(now - dt.timedelta(minutes=5 * i)).isoformat(timespec="seconds") for i in range(72)][::-1]
    one = [round(60 + 25 * math.sin(i / 7) + 8 * math.sin(i * 1.7), 1) for i in range(72)]
    two: list[float | None] = [round(30 + 20 * math.cos(i / 9), 1) for i in range(72)]
    two[30:36] = [None] * 6
    return {
        "data": [
            {"type": "scatter", "mode": "lines", "name": "GPU 0", "x": times, "y": one},
            {"type": "scatter", "mode": "lines", "name": "GPU 1", "x": times, "y": two},
        ],
        "layout": {"yaxis": {"range": [0, 100], "ticksuffix": " %"}},
    }


def samples(request: HttpRequest) -> dict[str, Any]:
    """The context of ``portal/design.html``."""
    now = clock.now()
    kinds = [
        (_("Requests, leases, jobs"), "", states.COMMON),
        (_("Steps"), "step", states.STEP),
        (_("How a lease ended"), "end", states.END),
        (_("GPUs"), "gpu", states.GPU),
        (_("Nodes"), "node", states.NODE),
        (_("Quota"), "quota", states.QUOTA),
        (_("Severity"), "severity", states.SEVERITY),
        (_("People, tokens, deliveries"), "person", states.PERSON),
    ]
    return {
        "kinds": [(title, kind, list(table)) for title, kind, table in kinds],
        "icons": sorted(icons.symbols()),
        "form": SampleForm({"duration": 12, "gpus": 16, "kind": "training", "interruptible": "on"}),
        "page": Paginator(range(214), 50).get_page(request.GET.get("page")),
        "chart": _chart(now),
        "spark": [50 + 40 * math.sin(i / 3) if i not in (11, 12) else None for i in range(40)],
        "sum": [
            {"label": _("effective"), "value": 186261.8, "text": "186,261.8", "cat": 1},
            {"label": _("idle"), "value": 61802.2, "text": "61,802.2", "cat": 2},
            {"label": _("unallocated"), "value": 41203.5, "text": "41,203.5", "cat": 8},
            {"label": _("stranded"), "value": 2914.2, "text": "2,914.2", "cat": 8, "hatch": True},
            {"label": _("down"), "value": 3124.5, "text": "3,124.5", "tone": "bad"},
        ],
        "steps": [
            {"s": "done", "title": _("Submitted"), "note": "Lin Yue"},
            {"s": "done", "title": _("Approved"), "note": "Chen Hao"},
            {"s": "now", "title": _("Queued"), "note": _("needs 8 free on one node, most is 5")},
            {"s": "todo", "title": _("Running")},
            {"s": "bad", "title": _("Stopped"), "note": _("node lost")},
        ],
        "history": [
            {"time": now, "icon": "play", "tone": "ok", "text": _("Started"), "note": "sh-h800-12"},
            {
                "time": now - dt.timedelta(hours=3),
                "icon": "approve",
                "text": _("Approved"),
                "note": "Chen Hao",
            },
        ],
        "tabs": [
            {"url": "?t=a", "label": _("People"), "count": 214, "current": True},
            {"url": "?t=b", "label": _("Departments"), "count": 18},
        ],
        "options": [("hour", _("Hour")), ("day", _("Day"))],
        "effects": [
            (_("GPUs given back"), "4 × H800"),
            (_("GPU-hours not run"), "47.8"),
            (_("Not charged"), "¥764.80"),
        ],
        "in_two_hours": now + dt.timedelta(hours=2, minutes=47),
        "before": now - dt.timedelta(minutes=3),
        "now": now,
        "cats": range(1, 9),
        "heat": range(6),
        "tones": states.TONES,
        "tiles": ["in_use", "idle", "free", "reserved", "split", "fault", "no_data", "maintenance"],
    }
