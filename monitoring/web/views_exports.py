"""Large files: ask for one, see how far it is, download it."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import FileResponse, HttpRequest, HttpResponseBase, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_safe

from monitoring.models import ExportJob
from monitoring.services.exports import OPEN, export_ask, export_open, exports_of
from portal.accounts.middleware import policy_of_request
from portal.accounts.policy import Policy
from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of
from quotas.selectors.about import filter_words
from quotas.selectors.money import PARAMS, book_months, line_filter, month_from
from quotas.templatetags.money_tags import month_name


def kind_words() -> dict[str, str]:
    """What each kind of file is, in the reader's language."""
    return {
        "lines_xlsx": _("Ledger lines, XLSX"),
        "lines_people": _("Ledger lines, CSV for people"),
        "lines_machines": _("Ledger lines, CSV for machines"),
        "focus": _("FOCUS 1.2, a month"),
    }


def error_words() -> dict[str, str]:
    """Why a file was not made, and what next."""
    return {
        "no_space": _("The disk is full. Nothing was written; ask again once there is room."),
        "not_written": _(
            "The file could not be written. Ask again; if it stays so, tell your administrator."
        ),
        "too_many_rows": _("A sheet holds 1,048,574 rows. Choose a month, or CSV."),
        "forbidden": _("You no longer see what was asked for."),
        "not_found": _("You no longer see what was asked for."),
    }


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def exports(request: HttpRequest) -> HttpResponseBase:
    """``/reports/files/``: the reader's files; POST asks for one (``file``, and a filter of lines). A filter in the
    address, as the ledger's and month's pages hand it on, stands in the form.
    """
    policy = policy_of_request(request)
    given = {name: request.GET[name] for name in sorted(PARAMS) if request.GET.get(name)}
    chosen = line_filter(given, policy)
    if request.method == "POST":
        try:
            export_ask(
                acting_user=actor_of(request), kind=request.POST.get("file", ""), params=request.POST.dict()
            )
        except DomainError as error:
            texts = [str(problem["detail"]) for problem in error.errors] or [str(error.detail)]
            messages.error(request, " ".join(texts))
        else:
            messages.success(request, _("The file is being made; you will be told when it is ready."))
        return HttpResponseRedirect(reverse("monitoring:exports"))
    words, errors = kind_words(), error_words()
    jobs = exports_of(policy)[:50]
    rows = [
        {
            "job": job,
            "what": words.get(job.kind, job.kind),
            "of": _of(job, policy),
            "percent": min(100, 100 * job.done // job.total) if job.total else 0,
            "error": errors.get(job.error_code, job.error_code),
            "icon": {"ready": "check", "failed": "fault", "running": "refresh", "queued": "clock"}.get(
                job.state, ""
            ),
            "tone": {"ready": "ok", "failed": "bad", "running": "info", "queued": "hold"}.get(
                job.state, "mute"
            ),
        }
        for job in jobs
    ]
    context = {
        "rows": rows,
        "kinds": list(words.items()),
        "months": book_months(),
        "month": chosen.month,
        "asked": request.GET.get("file", ""),
        "chips": filter_words(chosen, policy),
        "given": [(name, value) for name, value in given.items() if name != "month"],
        "active": any(job.state in OPEN for job in jobs),
    }
    return render(request, "monitoring/reports/files.html", context)


def _of(job: ExportJob, policy: Policy) -> str:
    """Which lines are in it, in words; what the reader no longer sees is not named."""
    asked = {name: value for name, value in job.params.items() if name in PARAMS}
    month = asked.pop("month", "")
    words = [month_name(month_from(month)) if month else _("all months")]
    try:
        words += [label for label, _param in filter_words(line_filter(asked, policy), policy)]
    except DomainError:
        words.append(_("a filter that no longer holds"))
    return " · ".join(words)


@login_required
@require_safe
def export_file(request: HttpRequest, uid: UUID) -> HttpResponseBase:
    """The finished file, for whoever asked for it and still sees all that is in it."""
    job, file = export_open(policy_of_request(request), uid)
    return FileResponse(file, as_attachment=True, filename=job.file_name)
