"""What a reader is told about ledger figures: definitions, the filter in words, the head of a file for people."""

from __future__ import annotations

from django.conf import settings
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext

from portal.accounts.policy import Policy
from portal.kernel.clock import now
from quotas.models import LedgerEntry
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.money import LineFilter
from quotas.selectors.month_words import month_name

DEFINITIONS = (
    gettext_lazy(
        "Allocated GPU·h: time a card or a share of it was held, times the share; from start until seen free."
    ),
    gettext_lazy(
        "Cost: GPU-milliseconds × price per GPU-hour ÷ 3,600,000, rounded half up to 0.000001, once per line."
    ),
    gettext_lazy(
        "A line is cut at midnight of the billing zone, at a change of price, and when a department moves."
    ),
    gettext_lazy("Totals are sums of these lines and nothing else."),
)


def filter_chips(chosen: LineFilter, policy: Policy) -> list[tuple[str, str]]:
    """(label, parameter) of what is chosen besides the month."""
    chips = []
    if chosen.department_id is not None:
        chips.append((policy.tree.path(chosen.department_id), "department"))
    if chosen.flavour is not None:
        chips.append((chosen.flavour.name, "flavour"))
    if chosen.user is not None:
        chips.append((chosen.user.get_full_name(), "user"))
    if chosen.site:
        chips.append((_("Site %(site)s") % {"site": chosen.site}, "site"))
    if chosen.day is not None:
        chips.append((chosen.day.isoformat(), "day"))
    return chips


def filter_words(chosen: LineFilter, policy: Policy) -> list[tuple[str, str]]:
    """The same with the kind of line and the search, which pages show in their fields."""
    words = filter_chips(chosen, policy)
    if chosen.kind:
        words.append((_("Kind: %(kind)s") % {"kind": LedgerEntry.Kind(chosen.kind).label}, "kind"))
    if chosen.q:
        words.append((_("Search: %(text)s") % {"text": chosen.q}, "q"))
    return words


def about(chosen: LineFilter, policy: Policy, *, mark: int) -> list[tuple[str, str]]:
    """The head block of a file for people."""
    filters = "; ".join(label for label, _param in filter_words(chosen, policy)) or _("all that you may see")
    zone = billing_zone()
    rows = [
        (_("Period"), month_name(chosen.month) if chosen.month else _("all months")),
        (_("Filter"), filters),
        (_("Billing time zone"), zone.key),
        (_("Currency"), settings.GPUPOOL_CURRENCY),
        (pgettext("export", "Written"), f"{now().astimezone(zone):%Y-%m-%d %H:%M:%S %z}"),
        (_("Ledger to entry"), str(mark)),
    ]
    return [*rows, *((_("Definition"), str(text)) for text in DEFINITIONS)]
