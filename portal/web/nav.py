"""The shell's context: navigation by role, language, theme, zone, unread notices.

Entries name URLs of the rooms; one that is not mounted is left out. The figures beside entries are in ``counts``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.db import DatabaseError
from django.http import HttpRequest
from django.urls import NoReverseMatch, get_script_prefix, reverse
from django.utils import timezone, translation
from django.utils.functional import Promise, SimpleLazyObject
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from portal.web import counts, formats

THEME_COOKIE = "gpupool_theme"
ANY: frozenset[str] = frozenset()
RESEARCHER, LEAD, ADMIN, FINANCE, AUDITOR = "researcher", "lead", "pool_admin", "finance", "auditor"


@dataclass(frozen=True)
class Entry:
    """A place in the navigation. ``names``: URL names, the first that exists is used; ``roles``: who sees it
    (empty: all); ``within``: path beginnings, besides its own, where the entry counts as the current one; ``staff``:
    only for those who may use the data admin."""

    names: tuple[str, ...]
    icon: str
    label: str | Promise
    roles: frozenset[str] = ANY
    within: tuple[str, ...] = ()
    staff: bool = False


@dataclass(frozen=True)
class Group:
    """A titled part of the navigation."""

    label: str | Promise
    entries: tuple[Entry, ...]


def _r(*roles: str) -> frozenset[str]:
    return frozenset(roles)


GROUPS: tuple[Group, ...] = (
    Group(
        _("My work"),
        (
            Entry(("quotas:home",), "home", _("Home"), _r(RESEARCHER)),
            Entry(("quotas:request-new",), "plus", _("New request"), _r(RESEARCHER, LEAD)),
            Entry(
                ("quotas:requests", "quotas:request-list"),
                "list",
                _("My requests"),
                _r(RESEARCHER, LEAD),
                ("/requests/",),
            ),
            Entry(
                ("pool:leases", "pool:lease-list"),
                "clock",
                _("My leases"),
                _r(RESEARCHER, LEAD),
                ("/leases/",),
            ),
        ),
    ),
    Group(
        _("Department"),
        (
            Entry(
                ("quotas:approvals", "quotas:approval-list"),
                "approve",
                _("Approvals"),
                _r(LEAD, ADMIN, FINANCE),
                ("/approvals/",),
            ),
            Entry(
                ("quotas:quotas", "quotas:quota-tree", "quotas:quota-list"),
                "tree",
                _("Quotas"),
                ANY,
                ("/quotas/",),
            ),
        ),
    ),
    Group(
        _("Pool"),
        (
            Entry(("monitoring:wall",), "wall", _("GPU wall"), ANY, ("/wall/", "/gpus/")),
            Entry(("pool:nodes", "pool:node-list"), "server", _("Nodes"), _r(ADMIN, AUDITOR), ("/nodes/",)),
            Entry(
                ("pool:operations",),
                "gauge",
                _("Operations"),
                _r(ADMIN),
                ("/operations/", "/enrol/", "/scheduler/"),
            ),
            Entry(
                ("ops:incidents",), "fault", _("Incidents"), _r(ADMIN, AUDITOR), ("/incidents/", "/alerts/")
            ),
            Entry(("monitoring:waste",), "waste", _("Waste"), _r(LEAD, ADMIN, FINANCE, AUDITOR)),
        ),
    ),
    Group(
        _("Finance"),
        (
            Entry(("quotas:finance-home", "quotas:finance"), "home", _("Overview"), _r(FINANCE)),
            Entry(
                ("quotas:month",),
                "chart",
                pgettext_lazy("finance", "Month"),
                _r(FINANCE, AUDITOR, LEAD, ADMIN),
                ("/months/", "/month/"),
            ),
            Entry(
                ("quotas:budgets",), "gauge", _("Budgets"), _r(FINANCE, AUDITOR, LEAD, ADMIN), ("/budgets/",)
            ),
            Entry(
                ("quotas:prices", "quotas:price-list"),
                "coins",
                _("Price book"),
                _r(FINANCE, AUDITOR),
                ("/prices/",),
            ),
            Entry(
                ("quotas:ledger", "quotas:ledger-list"),
                "table",
                _("Ledger"),
                _r(FINANCE, AUDITOR),
                ("/ledger/",),
            ),
            Entry(
                ("monitoring:reports",),
                "chart",
                _("Reports"),
                _r(FINANCE, AUDITOR, ADMIN, LEAD),
                ("/reports/",),
            ),
        ),
    ),
    Group(
        _("Installation"),
        (
            Entry(
                ("accounts:people", "accounts:person-list", "accounts:user-list"),
                "users",
                _("People"),
                _r(ADMIN, AUDITOR),
                ("/people/", "/departments/"),
            ),
            Entry(
                ("quotas:policy", "quotas:approval-policy"),
                "sliders",
                _("Policy"),
                _r(ADMIN, AUDITOR),
                ("/policy/",),
            ),
            Entry(
                ("ops:audit", "accounts:audit", "ops:audit-list"),
                "shield",
                _("Audit"),
                _r(ADMIN, AUDITOR),
                ("/audit/",),
            ),
            Entry(("admin:index",), "table", _("Data admin"), ANY, staff=True),
        ),
    ),
)

ROLE_LABELS: dict[str, Any] = {
    ADMIN: _("Pool administrator"),
    FINANCE: _("Finance"),
    AUDITOR: _("Auditor"),
    LEAD: _("Department lead"),
    RESEARCHER: _("Researcher"),
}


def resolve(*names: str) -> str:
    """The address of the first URL name that is mounted without arguments, or ""."""
    for name in names:
        try:
            return reverse(name)
        except NoReverseMatch:
            continue
    return ""


def roles_of(request: HttpRequest) -> frozenset[str]:
    """Roles of the signed-in person (two queries, once per request)."""
    policy = getattr(request, "policy", None)
    return policy.roles if policy is not None else frozenset()


def _home_department(request: HttpRequest) -> str:
    policy = getattr(request, "policy", None)
    row = (
        policy.tree.rows.get(getattr(request.user, "home_department_id", None))
        if policy is not None
        else None
    )
    return row.name if row is not None else ""


def _groups(request: HttpRequest) -> list[dict[str, Any]]:
    roles = roles_of(request)
    staff = bool(getattr(request.user, "is_staff", False))
    here = request.path_info
    best, current = 0, None
    groups = []
    for group in GROUPS:
        rows: list[dict[str, Any]] = []
        for entry in group.entries:
            if (entry.roles and not entry.roles & roles) or (entry.staff and not staff):
                continue
            url = resolve(*entry.names)
            if not url:
                continue
            row = {
                "url": url,
                "icon": entry.icon,
                "label": entry.label,
                "count": counts.of(request, *entry.names),
                "current": False,
            }
            bare = f"/{url.removeprefix(get_script_prefix())}"
            for start in (bare, *entry.within):
                if here.startswith(start) and len(start) > best and (start != "/" or here == "/"):
                    best, current = len(start), row
            rows.append(row)
        if rows:
            groups.append({"label": group.label, "entries": rows})
    if current is not None:
        current["current"] = True
    return groups


def theme_of(request: HttpRequest) -> str:
    """``light``, ``dark`` or "" (as the device): the cookie of this browser first, then the person's choice."""
    for choice in (
        request.COOKIES.get(THEME_COOKIE, ""),
        getattr(getattr(request, "user", None), "theme", ""),
    ):
        if choice in {"light", "dark"}:
            return str(choice)
        if choice == "system":
            return ""
    return ""


def _languages() -> list[dict[str, str]]:
    now = (translation.get_language() or "en").lower()
    return [
        {
            "code": code,
            "name": {"zh-hans": "中文", "en": "English"}.get(code, str(name)),
            "switch": {"zh-hans": "切换到中文", "en": "Switch to English"}.get(code, str(name)),
            "lang": "zh-Hans" if code == "zh-hans" else code,
        }
        for code, name in settings.LANGUAGES
        if code.lower() != now
    ]


def navigation(request: HttpRequest) -> dict[str, Any]:
    """Context processor: ``shell`` with what ``base.html`` shows. Lazy: an API or fragment answer pays nothing."""

    def build() -> dict[str, Any]:
        try:
            user = getattr(request, "user", None)
            signed_in = bool(user is not None and user.is_authenticated)
            roles = roles_of(request) if signed_in else frozenset()
        except DatabaseError:  # the page that says so must still be drawn
            signed_in, roles = False, frozenset()
            request.user = AnonymousUser()
        return {
            "signed_in": signed_in,
            "groups": _groups(request) if signed_in else [],
            "role": next((label for key, label in ROLE_LABELS.items() if key in roles), ""),
            "home_department": _home_department(request) if signed_in else "",
            "notices_url": resolve("notify:notices", "notify:notice-list", "notify:list", "notify:inbox"),
            "unread": counts.of(request, "unread") if signed_in else 0,
            "profile_url": resolve("accounts:preferences", "accounts:profile", "accounts:settings"),
            "logout_url": resolve("accounts:logout"),
            "login_url": resolve("accounts:login"),
            "help_url": resolve("help"),
            "api_url": resolve("api-docs"),
            "theme_cookie": THEME_COOKIE,
            "theme_url": resolve("accounts:theme"),
            "cookie_path": settings.SESSION_COOKIE_PATH,
            "languages": _languages(),
            "html_lang": "zh-Hans" if formats.is_chinese() else "en",
            "theme": theme_of(request),
            "zone": timezone.get_current_timezone_name(),
            "offset": formats.offset(),
            "currency": settings.GPUPOOL_CURRENCY,
            "version": settings.GPUPOOL_VERSION,
            "organisation": settings.GPUPOOL_ORGANISATION,
            "demo": settings.GPUPOOL_DEMO,
        }

    return {"shell": SimpleLazyObject(build)}
