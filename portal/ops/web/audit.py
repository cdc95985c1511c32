"""Pages of the audit trail: the list, one change with before and after, an export."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from typing import Any
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.dateparse import parse_date
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_safe

from portal.kernel.clock import now
from portal.kernel.csv_export import csv_response, people_csv
from portal.ops.models import AuditEvent
from portal.ops.selectors import audit_filtered, audit_total, audit_visible, history_of, same_request

PER_PAGE = 50
MOST_EXPORTED = 10_000
AREAS: tuple[tuple[str, Any], ...] = (
    ("user", gettext_lazy("People")),
    ("role", gettext_lazy("Roles")),
    ("token", gettext_lazy("Tokens")),
    ("department", gettext_lazy("Departments")),
    ("request", gettext_lazy("Requests")),
    ("approval", gettext_lazy("Approvals")),
    ("quota", gettext_lazy("Quotas")),
    ("policy", gettext_lazy("Policy")),
    ("allocation", gettext_lazy("Allocations")),
    ("node", gettext_lazy("Nodes")),
    ("gpu", gettext_lazy("GPUs")),
    ("price", gettext_lazy("Prices")),
    ("ledger", gettext_lazy("Ledger")),
    ("month", gettext_lazy("Months")),
    ("incident", gettext_lazy("Incidents")),
    ("webhook", gettext_lazy("Webhooks")),
)
VIAS: tuple[tuple[str, Any], ...] = (
    ("page", gettext_lazy("Page")),
    ("api", gettext_lazy("API")),
    ("token", gettext_lazy("Token")),
    ("agent", gettext_lazy("Agent")),
    ("task", gettext_lazy("Task")),
    ("command", gettext_lazy("Command")),
)
PAGES = {
    "accounts.user": "accounts:person",
    "accounts.department": "accounts:department",
    "quotas.capacityrequest": "quotas:request-detail",
    "quotas.quotachangerequest": "quotas:quota-change",
    "pool.node": "pool:node",
    "pool.allocation": "pool:allocation",
    "monitoring.gpu": "monitoring:gpu",
    "pool.gpu": "monitoring:gpu",
    "monitoring.metricsource": "monitoring:source",
    "ops.incident": "ops:incident",
}


def address_of(event: AuditEvent) -> str:
    """The page of what an event is about, or "" where there is none."""
    name = PAGES.get(event.object_type)
    if name is None or event.object_uid is None:
        return ""
    try:
        return reverse(name, args=[event.object_uid])
    except NoReverseMatch:
        return ""


def changes_of(event: AuditEvent) -> list[tuple[str, Any, Any]]:
    """(field, before, after) of an event; a missing side is None."""
    names = [*event.before, *(k for k in event.after if k not in event.before)]
    return [(name, _text(event.before.get(name)), _text(event.after.get(name))) for name in names]


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(str(v) for v in value)
    if isinstance(value, dict):
        return "; ".join(f"{k}: {v}" for k, v in value.items())
    return value


def _filtered(request: HttpRequest) -> QuerySet[AuditEvent]:
    zone = timezone.get_current_timezone()

    def day(name: str) -> date | None:
        try:
            return parse_date(request.GET.get(name, ""))
        except ValueError:
            return None

    first, last = day("from"), day("to")
    actor = request.GET.get("actor", "")
    return audit_filtered(
        audit_visible(request.policy),  # type: ignore[attr-defined]
        search=request.GET.get("q", "").strip()[:100],
        action=request.GET.get("act", "").strip()[:64],
        object_type=request.GET.get("object", "").strip()[:48],
        via=via if (via := request.GET.get("via", "")) in dict(VIAS) else "",
        actor_id=int(actor) if actor.isdecimal() else None,
        since=datetime.combine(first, time.min, zone) if first else None,
        until=datetime.combine(last + timedelta(days=1), time.min, zone) if last else None,
    )


def _allowed(request: HttpRequest) -> None:
    policy = request.policy  # type: ignore[attr-defined]
    policy.require(bool(policy.scope("auditor", "pool_admin")))


def _api_call(request: HttpRequest) -> str:
    """The call that gives the rows of this page: its filters under their names in the API."""
    names = {"q": "q", "act": "action", "object": "object_type", "via": "via"}
    asked = {name: request.GET[key] for key, name in names.items() if request.GET.get(key)}
    return f"GET /api/v1/audit/?{urlencode(asked)}" if asked else "GET /api/v1/audit/"


def _number(request: HttpRequest, name: str) -> int | None:
    value = request.GET.get(name, "")
    return int(value) if value.isdecimal() and len(value) < 19 else None


@login_required
@require_safe
def audit(request: HttpRequest) -> HttpResponse:
    """``/audit/``: newest first; ``?before=`` and ``?after=`` are cursors, ``?show=`` names the opened row."""
    _allowed(request)
    rows = _filtered(request)
    before, after = _number(request, "before"), _number(request, "after")
    if after is not None:
        found = list(rows.filter(pk__gt=after).order_by("id")[: PER_PAGE + 1])[::-1]
        newer, older = len(found) > PER_PAGE, True
        found = found[-PER_PAGE:]
    else:
        if before is not None:
            rows = rows.filter(pk__lt=before)
        found = list(rows[: PER_PAGE + 1])
        newer, older = before is not None, len(found) > PER_PAGE
        found = found[:PER_PAGE]
    show = _number(request, "show")
    opened = next((e for e in found if e.pk == show), None)
    if opened is None and show is not None:
        opened = audit_visible(request.policy).filter(pk=show).first()  # type: ignore[attr-defined]
    opened = opened or (found[0] if found else None)
    context: dict[str, Any] = {
        "events": [(e, changes_of(e)) for e in found],
        "opened": opened,
        "newer": found[0].pk if newer and found else None,
        "older": found[-1].pk if older and found else None,
        "total": audit_total(),
        "areas": AREAS,
        "vias": VIAS,
        "api_call": _api_call(request),
        "filtered": any(request.GET.get(k) for k in ("q", "act", "object", "via", "from", "to", "actor")),
    }
    if opened is not None:
        context |= {
            "changes": changes_of(opened),
            "address": address_of(opened),
            "siblings": same_request(opened),
            "history": [e for e in history_of(opened.object_uid, 8) if e.pk != opened.pk]
            if isinstance(opened.object_uid, UUID)
            else [],
        }
    return render(request, "ops/audit.html", context)


@login_required
@require_safe
def audit_export(request: HttpRequest) -> HttpResponse:
    """``/audit/export.csv``: the filtered rows, newest first, at most 10,000."""
    _allowed(request)
    rows = _filtered(request)[:MOST_EXPORTED]
    zone = timezone.get_current_timezone()

    def lines() -> Iterator[list[Any]]:
        for e in rows.iterator(chunk_size=1000):
            changes = "; ".join(
                f"{n}: {b if b is not None else '–'} → {a if a is not None else '–'}"
                for n, b, a in changes_of(e)
            )
            at = e.at.astimezone(zone).isoformat(timespec="milliseconds")
            yield [
                at,
                e.actor_name,
                e.via,
                e.action,
                e.object_type,
                e.object_label,
                changes,
                e.reason,
                e.request_id,
            ]

    about = [
        (_("Audit"), _("newest first, at most 10,000 rows")),
        (_("Filter"), request.GET.urlencode() or _("none")),
        (_("Times in"), str(zone)),
        (_("Made"), now().astimezone(zone).isoformat(timespec="seconds")),
    ]
    columns = [
        _("Time"),
        _("Who"),
        _("By way of"),
        _("Act"),
        _("Kind of object"),
        _("Object"),
        _("Change"),
        _("Reason"),
        _("Request id"),
    ]
    return csv_response("audit.csv", people_csv(about=about, columns=columns, rows=lines()))
