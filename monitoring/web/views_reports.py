"""Pages of reports: the list, one report, kept runs, saved questions."""

from __future__ import annotations

from datetime import date
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST, require_safe

from monitoring.models import ReportRun, SavedReport
from monitoring.selectors.reports.base import GROUP_WORDS, Answer, Ask, Kind, ask_from, day_axis
from monitoring.selectors.reports.frozen import Content, content_of, coverage_text, filter_text, period_text
from monitoring.selectors.reports.idle import idle_surcharge
from monitoring.selectors.reports.kinds import KINDS, kind_of
from monitoring.selectors.reports.period import DAYS
from monitoring.selectors.reports.runs import run_for
from monitoring.services.report_runs import clean_params, may_read, report_forget, report_run, report_save
from monitoring.web.report_figures import group_bars, part_rows
from monitoring.web.report_files import file_of
from monitoring.web.report_look import LOOK, heads_of, look_of, shown_table
from portal.accounts.middleware import policy_of_request
from portal.kernel.errors import DomainError, Invalid, NotFound
from portal.ops.actor import actor_of
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.money import book_state
from quotas.selectors.running import one_look
from quotas.web.money.common import day_links
from quotas.web.money.look import remembered

KNOWN = frozenset(
    {"period", "from", "to", "by", "department", "flavour", "user", "site", "page", "format", *LOOK}
)


def _ask(request: HttpRequest, code: str) -> tuple[Kind, Ask]:
    kind, policy = kind_of(code), policy_of_request(request)
    may_read(kind, policy)
    unknown = sorted(set(request.GET) - KNOWN)
    if unknown:
        raise Invalid.field(unknown[0], _("This filter is not known here."))
    return kind, ask_from(kind, request.GET.dict(), policy)


@login_required
@require_safe
def reports(request: HttpRequest) -> HttpResponse:
    """``/reports/``: the kinds there are, saved questions, the reader's kept runs."""
    policy = policy_of_request(request)
    everything = policy.reads_money.everything
    saved = (
        SavedReport.objects.filter(Q(owner=policy.user) | Q(shared=True), removed_at=None)
        .select_related("owner")
        .order_by("name", "id")
    )
    rows = [s for s in saved[:50] if s.kind in KINDS and (everything or not KINDS[s.kind].pool_only)]
    runs = (
        ReportRun.objects.filter(owner=policy.user).defer("content").select_related("saved").order_by("-id")
    )
    saved_rows = [
        (s, KINDS[s.kind], f"{reverse('monitoring:report', args=[s.kind])}?{urlencode(s.params)}")
        for s in rows
    ]
    context = {
        "everything": everything,
        "kinds": [k for k in KINDS.values() if everything or not k.pool_only],
        "saved": saved_rows,
        "runs": [(r, KINDS[r.kind]) for r in runs[:20] if r.kind in KINDS],
    }
    return render(request, "monitoring/reports/list.html", context)


@login_required
@require_safe
@remembered("report")
@one_look()
def report(request: HttpRequest, code: str) -> HttpResponse:
    """``/reports/<kind>/?period=…&by=…``: the report as of now."""
    kind, ask = _ask(request, code)
    answer = kind.make(ask)
    books = book_state()
    content = content_of(kind, ask, answer, mark=books.mark)
    main = answer.tables[0]
    look = look_of(request.GET.dict(), main)
    shown = shown_table(look, main)
    _link_days(kind, ask, answer, request.GET.dict())
    context: dict[str, Any] = {
        "kind": kind,
        "ask": ask,
        "answer": answer,
        "content": content,
        "main": shown,
        "heads": look.shown(heads_of(main)),
        "columns": look.choices(heads_of(main), request.GET),
        "page": Paginator(shown.linked, 50).get_page(request.GET.get("page")),
        "total": shown.total(),
        "more": [(table, table.total()) for table in answer.tables[1:]],
        "period": period_text(ask.period),
        "filter": filter_text(ask),
        "before": period_text(answer.before or ask.period.before()),
        "coverage": coverage_text(answer.covered) if answer.covered and answer.covered[1] else "",
        "full": answer.covered is not None and answer.covered[0] == answer.covered[1],
        "groupings": [(code_, GROUP_WORDS[code_]) for code_ in kind.groupings],
        "months": books.months,
        "spans": [(code_, _("last %(n)s days") % {"n": n}) for code_, n in DAYS.items()],
        "chips": _chips(ask),
        "parts": part_rows(content.parts),
        "bars": group_bars(main),
        "zone": billing_zone().key,
        "every": [(value, label) for value, label in SavedReport.Every.choices],
        "may_share": bool(ask.policy.reads_money),
        "params": {**clean_params(request.GET.dict()), **look.params()},
        "api": f"GET /api/v1/reports/{kind.code}/?{urlencode(clean_params(request.GET.dict()))}".rstrip("?"),
    }
    return render(request, "monitoring/reports/report.html", context)


def _link_days(kind: Kind, ask: Ask, answer: Answer, params: dict[str, str]) -> None:
    """The days of charts about held hours open the lines of the ledger; chargeback those of the same books."""
    if kind.code not in {"utilization", "chargeback", "waste"} or answer.chart is None:
        return
    days = [date.fromisoformat(row[0]) for row in answer.chart["table"]["rows"]]
    books = (
        {"month": f"{ask.period.first:%Y-%m}"} if kind.code == "chargeback" and ask.period.is_month else {}
    )
    day_links(answer.chart, day_axis(days), days, {**params, **books})


def _chips(ask: Ask) -> list[tuple[str, str]]:
    chosen = ask.chosen
    chips = []
    if chosen.department_id is not None:
        chips.append((ask.policy.tree.path(chosen.department_id), "department"))
    if chosen.flavour is not None:
        chips.append((chosen.flavour.name, "flavour"))
    if chosen.user is not None:
        chips.append((chosen.user.get_full_name(), "user"))
    if chosen.site:
        chips.append((_("Site %(site)s") % {"site": chosen.site}, "site"))
    return chips


@login_required
@require_safe
@one_look()
def report_waste_card(request: HttpRequest) -> HttpResponse:
    """A fragment for the finance home: this month's waste in money, and where it is."""
    kind = KINDS["waste"]
    answer = kind.make(ask_from(kind, {}, policy_of_request(request)))
    main = answer.tables[0]
    place = main.column("idle")
    context = {
        "stats": answer.stats,
        "main": main,
        "rows": [(row, params) for row, params in main.linked if row[place]][:5],
        "coverage": coverage_text(answer.covered) if answer.covered and answer.covered[1] else "",
        "full": answer.covered is not None and answer.covered[0] == answer.covered[1],
    }
    return render(request, "monitoring/reports/_waste_card.html", context)


@login_required
@require_safe
@one_look()
def report_idle_preview(request: HttpRequest) -> HttpResponse:
    """``/reports/idle-surcharge/?period=2026-05&flavour=…&idle=1500000``: for the price book, what a surcharge (micro
    units per idle GPU-hour) would have brought in that time, rounded as it would be booked.
    """
    text = request.GET.get("idle", "")
    if not text.isdecimal() or len(text) > 13:
        raise Invalid.field("idle", _("This is no amount."))
    ask = ask_from(KINDS["waste"], clean_params(request.GET.dict()), policy_of_request(request))
    idle_ms, micro = idle_surcharge(ask, int(text))
    context = {"idle_ms": idle_ms, "micro": micro, "period": period_text(ask.period)}
    return render(request, "monitoring/reports/_idle_preview.html", context)


@login_required
@require_safe
@one_look()
def report_coverage(request: HttpRequest) -> HttpResponse:
    """``/reports/coverage/?period=2026-05``: for the month close: how much of what was held was seen."""
    answer = KINDS["utilization"].make(
        ask_from(KINDS["utilization"], clean_params(request.GET.dict()), policy_of_request(request))
    )
    context = {
        "coverage": coverage_text(answer.covered) if answer.covered and answer.covered[1] else "",
        "full": answer.covered is not None and answer.covered[0] == answer.covered[1],
        "period": request.GET.get("period", ""),
    }
    return render(request, "monitoring/reports/_coverage.html", context)


@login_required
@require_safe
@one_look()
def report_file(request: HttpRequest, code: str) -> HttpResponse:
    """``/reports/<kind>/file/?format=people|machines|xlsx|pdf`` with the page's filter."""
    kind, ask = _ask(request, code)
    content = content_of(kind, ask, kind.make(ask))
    name = f"gpu-{kind.code}-{ask.period.first:%Y-%m-%d}-{ask.period.last:%Y-%m-%d}"
    return file_of(content, request.GET.get("format", "people"), name)


@login_required
@require_POST
def report_keep(request: HttpRequest, code: str) -> HttpResponse:
    """POST: keep this report as it is now."""
    kind, policy = kind_of(code), policy_of_request(request)
    ask = ask_from(kind, clean_params(request.POST.dict()), policy)
    run = report_run(acting_user=actor_of(request), kind=kind, ask=ask)
    messages.success(request, _("Kept as %(ref)s.") % {"ref": run.ref})
    return HttpResponseRedirect(reverse("monitoring:report-run", args=[run.uid]))


@login_required
@require_POST
def report_save_view(request: HttpRequest, code: str) -> HttpResponse:
    """POST: keep the question under a name, shared or sent on request."""
    kind = kind_of(code)
    params = clean_params(request.POST.dict(), LOOK)
    back = f"{reverse('monitoring:report', args=[code])}?{urlencode(params)}"
    try:
        report_save(
            acting_user=actor_of(request),
            policy=policy_of_request(request),
            kind=kind,
            name=request.POST.get("name", ""),
            params=params,
            shared=request.POST.get("shared") == "on",
            every=request.POST.get("every", ""),
        )
    except DomainError as error:
        texts = [str(problem["detail"]) for problem in error.errors] or [str(error.detail)]
        messages.error(request, " ".join(texts))
        return HttpResponseRedirect(back)
    messages.success(request, _("Saved. It stands under Reports."))
    return HttpResponseRedirect(reverse("monitoring:reports"))


@login_required
@require_POST
def report_forget_view(request: HttpRequest, uid: UUID) -> HttpResponse:
    """POST: take a saved question away."""
    saved = SavedReport.objects.filter(uid=uid, owner=policy_of_request(request).user).first()
    if saved is None:
        raise NotFound(code="not_found", detail=_("There is no such report."))
    report_forget(acting_user=actor_of(request), saved=saved)
    messages.success(request, _("%(name)s is no longer saved.") % {"name": saved.name})
    return HttpResponseRedirect(reverse("monitoring:reports"))


@login_required
@require_safe
def report_run_page(request: HttpRequest, uid: UUID) -> HttpResponse:
    """``/reports/runs/<uid>/``: a report as it was."""
    run = run_for(policy_of_request(request), uid)
    content = Content.from_json(run.content)
    main = content.tables[0]
    look = look_of(request.GET.dict(), main)
    shown = shown_table(look, main)
    context = {
        "run": run,
        "content": content,
        "main": shown,
        "total": shown.total(),
        "heads": look.shown(heads_of(main)),
        "columns": look.choices(heads_of(main), request.GET),
        "more": [(table, table.total()) for table in content.tables[1:]],
        "parts": part_rows(content.parts),
        "again": f"{reverse('monitoring:report', args=[run.kind])}?{urlencode(run.params)}",
    }
    return render(request, "monitoring/reports/run.html", context)


@login_required
@require_safe
def report_run_file(request: HttpRequest, uid: UUID) -> HttpResponse:
    """The run as a file: the same bytes each time."""
    run = run_for(policy_of_request(request), uid)
    name = f"gpu-{run.kind}-{run.ref}"
    return file_of(Content.from_json(run.content), request.GET.get("format", "people"), name)
