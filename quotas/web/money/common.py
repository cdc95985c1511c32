"""Shared by the finance pages: who may open them, their query strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import wraps
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.db.models import Sum
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext, gettext_lazy

from portal.accounts.middleware import policy_of_request
from portal.accounts.models import Role
from portal.kernel.errors import Refused
from quotas.selectors.about import DEFINITIONS, about, filter_chips
from quotas.selectors.money import PARAMS, Lines, line_filter

__all__ = [
    "DEFINITIONS",
    "MONEY_ROLES",
    "about",
    "day_links",
    "filter_chips",
    "for_roles",
    "lines_of",
    "signed_in",
    "too_many",
]

View = Callable[..., HttpResponse]


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


def day_links(
    figure: dict[str, Any], names: Sequence[Any], days: Iterable[date], params: Mapping[str, Any]
) -> None:
    """Let each day of a chart, and of its table, open the lines of the ledger. `names`: the days on the axis, in the
    order of the table's rows; `params`: the filter that the lines share."""
    address = reverse("quotas:ledger")
    chosen = {name: params[name] for name in PARAMS if params.get(name)}
    figure["links"] = {
        "x": list(names),
        "to": [f"{address}?{urlencode({**chosen, 'day': day.isoformat()})}" for day in days],
    }


LINES_AT_ONCE = 100_000
"""Lines of a file that a page writes while its reader waits; more are made by a worker."""


def too_many(request: HttpRequest, lines: Lines) -> HttpResponse | None:
    """For a file of more lines than a page writes at once: the way to the large files, with the same filter."""
    n = lines.sums().aggregate(n=Sum("lines", default=0))["n"]
    if n <= LINES_AT_ONCE:
        return None
    messages.info(
        request,
        gettext("These are %(n)s lines. A file of so many is made beside the page; choose its kind here.")
        % {"n": f"{n:,}"},
    )
    chosen = {name: request.GET[name] for name in sorted(PARAMS) if request.GET.get(name)}
    if lines.filter.month is not None:
        chosen["month"] = f"{lines.filter.month:%Y-%m}"
    chosen["file"] = "lines_machines" if request.GET.get("for") == "machines" else "lines_people"
    return HttpResponseRedirect(f"{reverse('monitoring:exports')}?{urlencode(chosen)}#new")


def lines_of(request: HttpRequest, *, month: date | None = None) -> Lines:
    """The reader's ledger lines under the filter of the query string."""
    policy = policy_of_request(request)
    return Lines(policy, line_filter(request.GET, policy, month=month))
