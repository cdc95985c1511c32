"""Pages of waste: findings by kind with money, one finding with its evidence, acts on it, a file."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import pgettext
from django.views.decorators.http import require_POST, require_safe

from monitoring.models import Finding
from monitoring.selectors import findings as found
from monitoring.services.finding_acts import acts_of, finding_act, may_act
from monitoring.web.finding_words import ENTRY_LOOKS, advice_words, entry_words, evidence_words
from monitoring.web.use_figures import turn_figure
from portal.accounts.middleware import policy_of_request
from portal.accounts.models import Department, Role
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.csv_export import csv_response, people_csv
from portal.kernel.errors import DomainError, Invalid
from portal.kernel.units import gpu_hours, money_from_micro
from portal.ops.actor import actor_of
from portal.web.actors import actor_word
from quotas.engine.billing import local_day
from quotas.selectors.billing_time import billing_zone

PER_PAGE = 50
MOST_EXPORTED = 10_000
KNOWN = frozenset({"kind", "state", "department", "sort", "page", "allocation"})
STATES = ("open", "dismissed", "closed", "all")


def reads_waste(policy: Policy) -> bool:
    """Who has the page: those who read more than their own."""
    return bool(policy.reads) or policy.has(Role.LEAD)


def _chosen(request: HttpRequest, policy: Policy) -> tuple[Any, dict[str, Any]]:
    unknown = sorted(set(request.GET) - KNOWN)
    if unknown:
        raise Invalid.field(unknown[0], _("This filter is not known here."))
    get = request.GET
    kind = get.get("kind", "") if get.get("kind", "") in Finding.Kind.values else ""
    state = get.get("state", "open") if get.get("state", "open") in STATES else "open"
    sort = get.get("sort", "money") if get.get("sort", "money") in found.SORTS else "money"
    rows = found.findings_visible(policy).select_related(
        "holder", "department", "flavour", "gpu", "allocation"
    )
    if kind:
        rows = rows.filter(kind=kind)
    if state != "all":
        rows = rows.filter(state=state)
    department = _department(policy, get.get("department", ""))
    if department is not None:
        rows = rows.filter(department_id__in=policy.tree.subtree(department.pk))
    wanted = {"kind": kind, "state": state, "sort": sort, "department": department}
    return rows.order_by(found.SORTS[sort], "-id"), wanted


def _department(policy: Policy, text: str) -> Department | None:
    if not text:
        return None
    return next((row for row in policy.tree.rows.values() if text in (str(row.uid), row.code)), None)


@login_required
@require_safe
def waste_page(request: HttpRequest) -> HttpResponse:
    """``/waste/``: what the reader sees of it, the sums of seven days by kind, the largest first."""
    policy = policy_of_request(request)
    policy.require(reads_waste(policy))
    rows, wanted = _chosen(request, policy)
    page = Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))
    shown = list(page.object_list)
    sums = found.kind_sums(policy)
    departments = [
        (str(row.uid), "\u00a0" * 2 * depth + row.name)
        for depth, row in policy.tree.ordered()
        if row.pk in policy.reads
    ]
    context = {
        "page": page,
        "rows": [(row, acts_of(policy, row)[:1] if row.kind != "no_lease" else []) for row in shown],
        "lines": found.finding_lines([row.pk for row in shown]),
        "sums": [(kind, label, sums[kind]) for kind, label in Finding.Kind.choices],
        "total_ms": sum(s.gpu_ms for s in sums.values()),
        "total_micro": sum(s.micro for s in sums.values()),
        "wanted": wanted,
        "kinds": Finding.Kind.choices,
        "departments": departments,
        "states": [
            ("open", pgettext("state", "Open")),
            ("dismissed", pgettext("finding", "Dismissed")),
            ("closed", pgettext("state", "Closed")),
            ("all", _("All")),
        ],
        "sorts": [
            ("money", _("Most money first")),
            ("hours", _("Most GPU-hours first")),
            ("newest", _("Newest first")),
            ("oldest", _("Oldest first")),
        ],
        "turn": turn_figure(found.pool_weeks(), found.first_found()) if policy.reads.everything else None,
    }
    return render(request, "monitoring/waste.html", context)


@login_required
@require_safe
def waste_file(request: HttpRequest) -> HttpResponse:
    """The same rows as CSV for people."""
    policy = policy_of_request(request)
    policy.require(reads_waste(policy))
    rows, wanted = _chosen(request, policy)
    columns = [
        _("Finding"), _("Kind"), _("Subject"), _("Holder"), _("Department"), _("Since"), _("Counted until"),
        _("State"), _("What became of it"), _("GPU·h"), _("Money"), _("Confidence"), _("Evidence"),
        _("What would help"),
    ]  # fmt: skip
    about = [
        (_("Waste findings"), wanted["kind"] or _("All kinds")),
        (_("State"), wanted["state"]),
        (_("Department"), wanted["department"] or _("All departments")),
        (_("Made at"), timezone.localtime().isoformat(timespec="seconds")),
        (_("Definition"), _("A GPU-hour counts in one kind only. Missing data is unknown, never idle.")),
    ]
    lines = (
        [
            f.ref, f.get_kind_display(), f.subject_label, f.holder or "", f.department or "",
            timezone.localtime(f.since),
            timezone.localtime(f.seen_at), f.get_state_display(), f.get_outcome_display(),
            round(gpu_hours(f.gpu_ms), 6),
            money_from_micro(f.micro), f.get_confidence_display(), evidence_words(f.kind, f.rule, f.evidence),
            advice_words(f.kind, f.rule, f.evidence),
        ]
        for f in rows[:MOST_EXPORTED]
    )  # fmt: skip
    day = local_day(now(), billing_zone())
    return csv_response(f"waste-{day}.csv", people_csv(about=about, columns=columns, rows=lines))


@login_required
@require_safe
def finding_page(request: HttpRequest, uid: UUID) -> HttpResponse:
    """One finding: evidence, what it cost by day, who was told, what became of it."""
    return _detail(request, uid)


def _detail(request: HttpRequest, uid: UUID, error: DomainError | None = None) -> HttpResponse:
    policy = policy_of_request(request)
    finding = found.finding_for(policy, uid)
    entries = [
        {
            "time": entry.at,
            "text": entry_words(entry),
            "note": " · ".join(part for part in (actor_word(entry.actor_name), entry.text) if part),
            "tone": ENTRY_LOOKS.get(entry.kind, ("mute", "info"))[0],
            "icon": ENTRY_LOOKS.get(entry.kind, ("mute", "info"))[1],
        }
        for entry in finding.entries.order_by("-at", "-id")[:50]
    ]
    days = list(finding.days.order_by("-local_day")[:31])
    mine = finding.holder_id == request.user.pk
    context = {
        "f": finding,
        "entries": entries,
        "days": days,
        "acts": acts_of(policy, finding),
        "may_act": may_act(policy, finding),
        "reads": reads_waste(policy),
        "mine": mine,
        "may_excuse": mine and finding.kind == Finding.Kind.IDLE and finding.state != Finding.State.CLOSED,
        "error": error,
        "reason": request.POST.get("reason", ""),
        "before": Finding.objects.filter(subject_key=finding.subject_key).exclude(pk=finding.pk).count(),
    }
    return render(request, "monitoring/finding.html", context, status=error.status if error else 200)


@login_required
@require_POST
def finding_act_view(request: HttpRequest, uid: UUID, act: str) -> HttpResponse:
    """Tell, dismiss, take up again, open an incident; then back to where one came from."""
    policy = policy_of_request(request)
    finding = found.finding_for(policy, uid)
    try:
        finding_act(
            acting_user=actor_of(request),
            policy=policy,
            finding=finding,
            act=act,
            reason=request.POST.get("reason", ""),
        )
    except Invalid as error:
        return _detail(request, uid, error)
    words = {
        "tell": _("They are told, once."),
        "dismiss": _("Dismissed; it stays in the history with your reason."),
        "reopen": _("It counts again."),
        "incident": _("The incident is open."),
    }
    messages.success(request, f"{finding.ref}: {words[act]}")
    back = request.POST.get("back", "")
    if back == "list":
        query = request.POST.get("query", "")[:500]
        return HttpResponseRedirect(reverse("monitoring:waste") + (f"?{query}" if query else ""))
    return HttpResponseRedirect(reverse("monitoring:finding", args=[uid]))
