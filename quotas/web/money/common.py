"""Shared by the finance pages: who may open them, their query strings, what stands in the head of a file."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from functools import wraps
from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext

from portal.accounts.middleware import policy_of_request
from portal.accounts.models import Role
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Refused
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.money import LineFilter, Lines, line_filter
from quotas.templatetags.money_tags import month_name

View = Callable[..., HttpResponse]
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


def signed_in(view: View) -> View:
    """Pages that show each reader what is theirs: researchers own lines, leads their subtree."""

    return login_required(view)


def for_roles(*roles: str) -> Callable[[View], View]:
    """Pages for people who hold one of the roles; others get 403 with the reason."""

    def wrap(view: View) -> View:
        @login_required
        @wraps(view)
        def inner(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            if not policy_of_request(request).has(*roles):
                raise Refused(code="forbidden", detail=gettext_lazy("This page is for finance and auditors."))
            return view(request, *args, **kwargs)

        return inner

    return wrap


MONEY_ROLES = (Role.FINANCE, Role.AUDITOR, Role.POOL_ADMIN)


def lines_of(request: HttpRequest, *, month: date | None = None) -> Lines:
    """The reader's ledger lines under the filter of the query string."""
    policy = policy_of_request(request)
    return Lines(policy, line_filter(request.GET, policy, month=month))


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
    return chips


def about(chosen: LineFilter, policy: Policy, *, mark: int) -> list[tuple[str, str]]:
    """The head block of a file for people."""
    filters = "; ".join(label for label, _param in filter_chips(chosen, policy)) or _("all that you may see")
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
