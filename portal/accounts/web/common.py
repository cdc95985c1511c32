"""What the pages of this room share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from django.db.models import Count, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import User
from portal.accounts.policy import Policy
from portal.accounts.selectors.people import people_visible, sees_people
from portal.accounts.selectors.roles import bindings_list, tokens_in_state, tokens_visible

PER_PAGE = 50
TABS: tuple[tuple[str, str, Any], ...] = (
    ("people", "accounts:people", _("People")),
    ("departments", "accounts:departments", _("Departments")),
    ("roles", "accounts:roles", _("Roles")),
    ("tokens", "accounts:all_tokens", _("Tokens")),
)


def counts_of(querysets: dict[str, QuerySet[Any]]) -> dict[str, int]:
    """How many rows each of the querysets has, asked for in one query."""
    parts = {}
    for name, rows in querysets.items():
        grouped = rows.order_by().select_related(None).annotate(one=Value(1)).values("one")
        parts[name] = Coalesce(Subquery(grouped.annotate(n=Count("pk")).values("n")), 0)
    return dict(User.objects.order_by("pk").values(**parts)[:1].get())


def number(value: int) -> str:
    """A count with its thousands grouped, as all pages show them."""
    return f"{value:,}"


def policy_required(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Hand the person's policy to the view (`request.policy` comes from the middleware)."""

    @wraps(view)
    def inner(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return view(request, request.policy, *args, **kwargs)  # type: ignore[attr-defined]

    return inner


def choice(request: HttpRequest, name: str, known: Iterable[str], default: str = "") -> str:
    """A query parameter, if it is one of the known values."""
    value = request.GET.get(name, "")
    return value if value in set(known) else default


def section_tabs(policy: Policy, here: str) -> list[dict[str, Any]]:
    """Tabs of the people section that this person may open. Refuses those who may look up nobody."""
    policy.require(bool(sees_people(policy)))
    everything = policy.administers_people or policy.audits
    scope = sees_people(policy)
    rows = {"people": people_visible(policy), "roles": bindings_list(policy)}
    if everything:
        rows["tokens"] = tokens_in_state(tokens_visible(policy), "valid")
    counts = counts_of(rows)
    counts["departments"] = sum(1 for pk, row in policy.tree.rows.items() if row.is_open and pk in scope)
    return [
        {"url": reverse(name), "label": label, "current": key == here, "count": number(counts[key])}
        for key, name, label in TABS
        if key != "tokens" or everything
    ]
