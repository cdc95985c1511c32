"""What the pages of this room share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import ApiToken
from portal.accounts.policy import Policy
from portal.accounts.selectors.people import people_visible, sees_people
from portal.accounts.selectors.roles import bindings_list
from portal.kernel.clock import now

PER_PAGE = 50
TABS: tuple[tuple[str, str, Any], ...] = (
    ("people", "accounts:people", _("People")),
    ("departments", "accounts:departments", _("Departments")),
    ("roles", "accounts:roles", _("Roles")),
    ("tokens", "accounts:all_tokens", _("Tokens")),
)


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
    moment = now()
    counts: dict[str, int] = {
        "people": people_visible(policy).count(),
        "departments": sum(1 for pk, row in policy.tree.rows.items() if row.is_open and pk in scope),
        "roles": bindings_list(policy).count(),
    }
    if everything:
        counts["tokens"] = ApiToken.objects.filter(revoked_at=None, expires_at__gt=moment).count()
    return [
        {"url": reverse(name), "label": label, "current": key == here, "count": number(counts[key])}
        for key, name, label in TABS
        if key != "tokens" or everything
    ]
