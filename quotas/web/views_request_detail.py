"""The page of one request: path, why it waits, what is asked, its members, history; and the acts of its
requester, POST only.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.timezone import get_current_timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from portal.kernel.clock import now
from portal.kernel.errors import DomainError, Invalid
from portal.ops.actor import actor_of
from quotas.engine.recurrence import total_seconds
from quotas.models import CapacityRequest
from quotas.selectors.approvers import Deciders
from quotas.selectors.budgets import stopping_budget
from quotas.selectors.fit import assess
from quotas.selectors.requests import flavour_names, quota_bar
from quotas.selectors.series import progress_of
from quotas.selectors.shapes import AskShape
from quotas.selectors.trees import parents_in
from quotas.services.approvals import consent_until, request_consent
from quotas.services.asking_series import weekly_of
from quotas.services.dependencies import dependencies_change
from quotas.services.requests import request_withdraw
from quotas.services.scaling import service_renew
from quotas.services.windows import occurrence_move, occurrence_skip
from quotas.transitions import allowed
from quotas.web import present
from quotas.web.forms import local_input
from quotas.web.series_words import (
    after_rows,
    coming_windows,
    held_words,
    member_name,
    members_page,
    place_rows,
    progress_text,
    series_text,
    service_facts,
)
from quotas.web.views_requests import GROUPS, find_request

S = CapacityRequest.State


@login_required
@require_GET
def request_detail(request: HttpRequest, uid: uuid.UUID) -> HttpResponse:
    """One request: path, why it waits (a fragment of the pool), what is asked, quota if it starts,
    history.
    """
    row = find_request(request, uid)
    policy = request.policy  # type: ignore[attr-defined]
    deciders = Deciders.of_page(policy)
    own = row.requester_id == request.user.pk
    step = present.open_step(row)
    may = (
        deciders.may(request.user.pk, step, row) if step is not None and row.state == S.IN_APPROVAL else None
    )
    names = flavour_names()
    context = {
        "r": row,
        "title": present.title_of(row, names),
        "sub": present.sub_of(row),
        "steps": present.path_of_request(row, deciders),
        "history": present.history(row),
        "own": own,
        "step": step,
        "may": may,
        "bar": _bar(row, parents_in(policy.tree)),
        "department_path": policy.tree.path(row.department_id),
        "option_names": [names.get(code, code) for code in row.options],
        "need": need_words(row),
        "consent": _consent(row) if row.state == S.NEEDS_CONSENT else None,
        "can_change": own and (allowed("change", row.state) or allowed("save", row.state)),
        "can_withdraw": (own or policy.administers_pool)
        and allowed("withdraw", row.state)
        and row.let_go_at is None,
        "shows_progress": row.state in (S.QUEUED, S.ALLOCATED, S.ENDED) and not (row.series or row.held),
        "gpu_ms": _gpu_ms(row),
        "head": row.head,
        "member_name": member_name(row, row.head.series) if row.head is not None else "",
        "series_text": series_text(row),
        "held": held_words(row),
        "after": after_rows(row) if row.waits else [],  # type: ignore[attr-defined]
        "places": place_rows(row),
        "can_unhold": own and row.held in ("dependency", "failed") and row.state == S.QUEUED,
        "budget_stop": stopping_budget(row.department_id, policy.tree) if row.state == S.QUEUED else None,
        "can_renew": own and row.is_service and row.head_id is None and row.state in RENEWABLE,
        "latest_review": local_input(_latest_review(row)),
        **(_series(request, row) if row.series else {}),
        "api_call": f"GET /api/v1/requests/{row.uid}/",
        "signal_call": f'POST /api/v1/requests/{row.uid}/signal/ {{"value": 250}}',
    }
    return render(request, "quotas/request_detail.html", context)


RENEWABLE = (S.QUEUED, S.ALLOCATED, S.SERIES)


def _series(request: HttpRequest, row: CapacityRequest) -> dict[str, Any]:
    """A series' members, how far it is, its timetable or coming windows."""
    progress = progress_of(row)
    begun = row.decided_at is not None
    out: dict[str, Any] = {
        "members": members_page(row, request.GET.get("page"), progress.all) if begun else None,
        "progress": progress_text(progress),
        "service": service_facts(row) if row.series == CapacityRequest.Series.SERVICE else None,
    }
    if row.series == CapacityRequest.Series.WINDOW:
        out["coming"] = coming_windows(row) if row.state == S.SERIES else []
        out["skipped"] = row.window.get("skip", [])
    return out


def _gpu_ms(row: CapacityRequest) -> int | None:
    """GPU-milliseconds of all of it at most; None without an end."""
    if row.window:
        return row.charge_milli * total_seconds(weekly_of(row.window))
    if not row.duration_s:
        return None
    if row.array_count:
        return row.charge_milli // row.array_at_once * row.array_count * row.duration_s
    return row.charge_milli * row.duration_s


def _latest_review(row: CapacityRequest) -> datetime | None:
    """As far as a service's review date can be moved now."""
    return now() + timedelta(seconds=row.review_span_s) if row.review_span_s else None


def need_words(row: CapacityRequest) -> str:
    """A requirement in words: ``≥ 40 GiB, NVLink, FP8``."""
    need = row.requirement
    parts = [f"≥ {round(need['memory_mib'] / 1024)} GiB"] if need.get("memory_mib") else []
    parts += [word for name, word in (("nvlink", "NVLink"), ("fp8", "FP8"), ("mig", "MIG")) if need.get(name)]
    return ", ".join([*parts, *need.get("models", [])])


def _bar(row: CapacityRequest, parents: Mapping[int, int | None]) -> dict[str, Any] | None:
    """The quota bar of the department with this request on it."""
    flavour = row.flavour
    if flavour is None or row.state in GROUPS["ended"]:
        return None
    options = assess(
        department_id=row.department_id,
        flavours=[flavour],
        shape=AskShape.of(row),
        duration_s=row.duration_s,
        interruptible=row.interruptible,
        moment=now(),
        parents=parents,
    )
    if not options:
        return None
    bar = quota_bar(options[0].tree, flavour, row.department_id)
    ask = 0 if row.state in (S.ALLOCATED, S.SERIES) else row.charge_milli
    own = max(0, min(ask, bar.guaranteed - bar.used))
    return {"bar": bar, "ask": ask, "after": bar.used + ask, "own": own, "borrowed": ask - own}


def _consent(row: CapacityRequest) -> dict[str, Any]:
    """What an approver changed, with both costs."""
    change = row.consent_change
    return {
        "by": change.get("by_name", ""),
        "comment": change.get("comment", ""),
        "until": consent_until(row),
        "rows": [
            (
                present.field_word(name),
                present.value_word(name, change["before"].get(name)),
                present.value_word(name, value),
            )
            for name, value in change.get("values", {}).items()
        ],
        "cost_before": row.cost_at_most_micro,
        "cost_after": change.get("cost_at_most_micro"),
    }


@login_required
@require_POST
def request_act(request: HttpRequest, uid: uuid.UUID, act: str) -> HttpResponse:
    """Withdraw, agree or not to a change, stop waiting, renew, leave a window out or move it; back to the
    request with what happened.
    """
    row = find_request(request, uid)
    common: dict[str, Any] = {"acting_user": actor_of(request), "policy": request.policy, "request": row}  # type: ignore[attr-defined]
    try:
        if act == "withdraw":
            stop = request.POST.get("running", "stop") != "keep"
            request_withdraw(**common, reason=request.POST.get("reason", "").strip()[:500], stop_running=stop)
            messages.success(request, _("%(ref)s withdrawn.") % {"ref": row.ref})
        elif act == "unhold":
            dependencies_change(**common, after=[])
            messages.success(request, _("%(ref)s waits for nobody any more.") % {"ref": row.ref})
        elif act == "renew":
            service_renew(
                acting_user=common["acting_user"], request=row, review_at=_typed_moment(request, "review_at")
            )
            messages.success(request, _("%(ref)s renewed.") % {"ref": row.ref})
        elif act == "skip":
            occurrence_skip(**common, day=_typed_day(request))
            messages.success(request, _("The window of %(day)s is left out.") % {"day": request.POST["day"]})
        elif act == "move":
            occurrence_move(
                **common,
                day=_typed_day(request),
                start_at=_typed_moment(request, "start_at"),
                end_at=_typed_moment(request, "end_at"),
            )
            messages.success(request, _("Moved. The other windows stay where they are."))
        elif act in ("agree", "decline"):
            request_consent(**common, agree=act == "agree")
            words = (
                _("Agreed to the change.")
                if act == "agree"
                else _("Not agreed: it is back with the approver.")
            )
            messages.success(request, words)
        else:
            raise Http404
    except DomainError as error:
        if error.status == 403:
            raise
        texts = [str(problem["detail"]) for problem in error.errors] or [str(error.detail)]
        messages.error(request, " ".join(texts))
    back = row.head.uid if row.head is not None and request.POST.get("back") else row.uid
    return HttpResponseRedirect(reverse("quotas:request-detail", args=[back]))


def _typed_day(request: HttpRequest) -> date:
    try:
        return date.fromisoformat(request.POST.get("day", ""))
    except ValueError:
        raise Invalid.field("day", _("A date is needed here, for example 2026-12-31.")) from None


def _typed_moment(request: HttpRequest, name: str) -> datetime:
    """A local date and time of the reader as an aware one."""
    try:
        naive = datetime.fromisoformat(request.POST.get(name, ""))
    except ValueError:
        raise Invalid.field(name, _("A date and time is needed here.")) from None
    return naive if naive.tzinfo is not None else naive.replace(tzinfo=get_current_timezone())
