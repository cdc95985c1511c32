"""What the pages of this room share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from portal.accounts.policy import Policy
from portal.accounts.selectors.people import sees_people

PER_PAGE = 50
TABS: tuple[tuple[str, str, Any], ...] = (
    ("people", "accounts:people", _("People")),
    ("departments", "accounts:departments", _("Departments")),
    ("roles", "accounts:roles", _("Roles")),
    ("tokens", "accounts:all_tokens", _("Tokens")),
)


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
    return [
        {"url": reverse(name), "label": label, "current": key == here}
        for key, name, label in TABS
        if key != "tokens" or everything
    ]
