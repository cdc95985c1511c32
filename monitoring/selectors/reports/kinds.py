"""The kinds of reports there are."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from monitoring.selectors.reports.base import Kind
from monitoring.selectors.reports.billed import chargeback
from monitoring.selectors.reports.fleet import inventory, quota
from monitoring.selectors.reports.queue import capacity, waits
from monitoring.selectors.reports.used import utilization, waste
from portal.kernel.errors import NotFound

KINDS: dict[str, Kind] = {
    kind.code: kind
    for kind in (
        Kind(
            "utilization",
            _("Utilization"),
            _("Where the installed hours went, and how much of what was held did work."),
            ("department", "flavour", "user", "site", "cost_code", "path", "node", "lease"),
            utilization,
        ),
        Kind(
            "chargeback",
            _("Chargeback"),
            _("What each department is to be charged by the books, corrections told apart."),
            ("department", "flavour", "user", "site", "cost_code", "month"),
            chargeback,
        ),
        Kind(
            "waste",
            pgettext_lazy("report", "Waste"),
            _("What was paid for and not used, in hours and money."),
            ("department", "flavour", "user", "site", "cost_code", "lease"),
            waste,
        ),
        Kind(
            "quota",
            _("Quota against use"),
            _("Who holds how much of what was guaranteed."),
            ("department",),
            quota,
        ),
        Kind(
            "waits",
            _("Waits"),
            _("How long people waited for GPUs: half, and nine in ten."),
            ("department", "flavour", "user"),
            waits,
        ),
        Kind(
            "capacity",
            _("Capacity"),
            _("What is full and what people waited for: what to buy."),
            ("flavour",),
            capacity,
            pool_only=True,
        ),
        Kind(
            "inventory",
            _("Inventory"),
            _("What there is, and how available it was."),
            ("flavour",),
            inventory,
            pool_only=True,
        ),
    )
}


def kind_of(code: str) -> Kind:
    """The kind of this code. NotFound when there is none."""
    kind = KINDS.get(code)
    if kind is None:
        raise NotFound(code="not_found", detail=_("There is no such report."))
    return kind
