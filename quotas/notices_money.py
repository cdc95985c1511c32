"""The words of notices about money."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy as _

from portal.notify import kinds

MEASURES = {"money": _("money"), "hours": _("GPU-hours")}


def _words(params: dict[str, Any]) -> dict[str, Any]:
    stops = _("Nothing new starts above the guarantee until it ends.") if params.get("stops") else ""
    return {**params, "measure": MEASURES.get(params.get("measure", ""), ""), "effect": stops}


kinds.register(
    "quotas.budget_used",
    _("Budget of %(department)s: %(percent)s %% of its %(measure)s used"),
    _("It runs until %(until)s. %(effect)s"),
    group="money",
    label=_("A budget reaches 50, 80 or 100 %"),
    tone="warn",
    icon="coins",
    prepare=_words,
)
