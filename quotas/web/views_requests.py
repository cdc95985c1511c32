"""Pages of requests: list, form with its panel, detail, and the acts of their requester. Acts are POST
only.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import F, Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import pgettext
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.kernel.ids import uuid7
from portal.ops.actor import actor_of
from quotas.models import CapacityRequest, PriceRate, QuotaUsage
from quotas.selectors.approvals import subject_of
from quotas.selectors.approvers import Deciders
from quotas.selectors.fit import assess
from quotas.selectors.flavours import flavours_on_offer
from quotas.selectors.requests import flavour_names, quota_bar, visible_requests, with_open_step
from quotas.selectors.shapes import AskShape
from quotas.selectors.trees import parents_in
from quotas.services.approvals import consent_until, request_consent
from quotas.services.requests import (
    request_change,
    request_save_draft,
    request_submit,
    request_withdraw,
)
from quotas.transitions import allowed
from quotas.web import present
from quotas.web.fit_panel import panel
from quotas.web.forms import RequestForm

S = CapacityRequest.State
PAGE = 50
GROUPS: dict[str, list[str]] = {
    "open": [S.DRAFT, S.IN_APPROVAL, S.RETURNED, S.NEEDS_CONSENT, S.QUEUED, S.ALLOCATED],
    "ended": [S.ENDED, S.REJECTED, S.WITHDRAWN],
    "all": list(S.values),
}


def find_request(request: HttpRequest, uid: uuid.UUID) -> CapacityRequest:
    """One request that the person may see, else 404: absent and forbidden look alike."""
    found = with_open_step(visible_requests(request.policy)).filter(uid=uid).first()  # type: ignore[attr-defined]
    if found is None:
        raise Http404
    return found


def current_prices() -> dict[int, int]:
    """The general price per GPU-hour now, by flavour id."""
    rows = PriceRate.objects.filter(site_code="", during__contains=now())
    return dict(rows.values_list("flavour_id", "micro_per_gpu_hour"))


def make_form(request: HttpRequest, **kwargs: Any) -> RequestForm:
    """The form with what is on offer now."""
    return RequestForm(
        policy=request.policy,  # type: ignore[attr-defined]
        flavours=flavours_on_offer(),
        prices=current_prices(),
        cpu=settings.GPUPOOL_DEMO,
        **kwargs,
    )


def likely_flavour(request: HttpRequest) -> str:
    """The code of the flavour of which the person's department has most of its guarantee left; "" when
    none.
    """
    home = getattr(request.user, "home_department_id", None)
    rows = QuotaUsage.objects.filter(department_id=home, guaranteed__gt=F("total"), flavour__active=True)
    best = rows.annotate(left=F("guaranteed") - F("total")).order_by("-left", "flavour__position").first()
    return best.flavour.code if best is not None else ""


@login_required
@require_GET
def request_list(request: HttpRequest) -> HttpResponse:
    """Own requests; ``?of=all`` those of the departments that the person reads. Filters are in the URL."""
    policy = request.policy  # type: ignore[attr-defined]
    of, state, text = (
        request.GET.get("of", "mine"),
        request.GET.get("state", "open"),
        request.GET.get("q", "").strip(),
    )
    rows = visible_requests(policy)
    if of != "all":
        rows = rows.filter(requester=request.user)
    rows = rows.filter(state__in=GROUPS.get(state, [state]))
    if text:
        query = (
            Q(purpose__icontains=text)
            | Q(requester__display_name__icontains=text)
            | Q(department__name__icontains=text)
        )
        if (number := text.upper().removeprefix("R-")).isdecimal():
            query |= Q(pk=int(number[:18]))
        rows = rows.filter(query)
    flavour = request.GET.get("flavour", "")
    if flavour:
        rows = rows.filter(Q(flavour__code=flavour) | Q(options__contains=[flavour]))
    page = Paginator(with_open_step(rows).order_by("-id"), PAGE).get_page(request.GET.get("page"))
    names = flavour_names()
    deciders = Deciders.of_page(policy)
    context = {
        "page": page,
        "rows": [present.row_of(r, names, deciders) for r in page],
        "of": of,
        "state": state,
        "q": text,
        "flavour": flavour,
        "flavours": names,
        "states": [("open", pgettext("request", "Open")), ("ended", _("Ended")), ("all", _("All"))],
        "reads_others": bool(policy.reads),
        "q_id": "q",
    }
    return render(request, "quotas/request_list.html", context)


@login_required
@require_http_methods(["GET", "POST"])
def request_new(request: HttpRequest) -> HttpResponse:
    """The form. ``?from=<uid>`` starts from an old request; POST submits or saves a draft."""
    policy = request.policy  # type: ignore[attr-defined]
    policy.require(policy.asks_for)
    if request.method == "POST":
        return _post(request, None)
    source = None
    if text := request.GET.get("from", ""):
        source = _source(request, text)
    initial = RequestForm.initial_of(source, policy, request.GET.get("flavour") or likely_flavour(request))
    initial |= {"token": uuid7().hex, "cloned_from": str(source.uid) if source is not None else ""}
    if request.GET.get("shape") in CapacityRequest.Shape.values:
        initial["shape"] = request.GET["shape"]
    return _form_page(request, make_form(request, initial=initial), source=source)


@login_required
@require_http_methods(["GET", "POST"])
def request_edit(request: HttpRequest, uid: uuid.UUID) -> HttpResponse:
    """The same form on a draft, a returned request, or one that nobody decided yet."""
    row = find_request(request, uid)
    if row.requester_id != request.user.pk:
        raise Http404
    if not (allowed("save", row.state) or allowed("change", row.state)):
        messages.warning(request, _("It cannot be changed any more."))
        return HttpResponseRedirect(reverse("quotas:request-detail", args=[row.uid]))
    if request.method == "POST":
        return _post(request, row)
    initial = RequestForm.initial_of(row, request.policy)  # type: ignore[attr-defined]
    return _form_page(request, make_form(request, initial=initial), row=row)


def _source(request: HttpRequest, text: str) -> CapacityRequest | None:
    try:
        return find_request(request, uuid.UUID(text))
    except ValueError:
        return None


def _post(request: HttpRequest, row: CapacityRequest | None) -> HttpResponse:
    form = make_form(request, data=request.POST)
    values = form.values()
    common: dict[str, Any] = {"acting_user": actor_of(request), "policy": request.policy}  # type: ignore[attr-defined]
    source = _source(request, form.typed("cloned_from")) if form.typed("cloned_from") else None
    draft = "draft" in request.POST
    try:
        if draft:
            made = request_save_draft(**common, values=values, request=row, cloned_from=source)
            messages.success(request, _("%(ref)s saved as a draft.") % {"ref": made.ref})
        elif row is not None and not allowed("submit", row.state):
            made = request_change(
                **common, request=row, values=values, version=_number(request.POST.get("version"))
            )
            messages.success(request, _("%(ref)s changed; the steps begin anew.") % {"ref": made.ref})
        else:
            made = request_submit(
                **common, values=values, request=row, client_token=form.typed("token"), cloned_from=source
            )
            messages.success(request, _submitted_text(made))
    except DomainError as error:
        form.take(error, RequestForm.NAMES)
        return _form_page(request, form, row=row, source=source, status=error.status, blocked=error)
    return HttpResponseRedirect(reverse("quotas:request-detail", args=[made.uid]))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _submitted_text(made: CapacityRequest) -> str:
    if made.state == S.QUEUED:
        return _("%(ref)s submitted: nobody needs to approve, it is in the queue.") % {"ref": made.ref}
    return _("%(ref)s submitted.") % {"ref": made.ref}


def _form_page(
    request: HttpRequest,
    form: RequestForm,
    *,
    row: CapacityRequest | None = None,
    source: CapacityRequest | None = None,
    status: int = 200,
    blocked: DomainError | None = None,
) -> HttpResponse:
    old = CapacityRequest.objects.filter(requester=request.user).select_related("flavour").order_by("-id")[:8]
    names = flavour_names()
    context = {
        "form": form,
        "row": row,
        "source": source,
        "blocked": blocked,
        "old": [{"r": r, "title": present.title_of(r, names)} for r in old],
        "can_draft": row is None or allowed("save", row.state),
    }
    return render(request, "quotas/request_form.html", context, status=status)


@login_required
@require_POST
def request_fit(request: HttpRequest) -> HttpResponse:
    """The panel beside the form (htmx); writes nothing."""
    form = make_form(request, data=request.POST)
    context = panel(form.values(), user=request.user, policy=request.policy, offered=form.offered)  # type: ignore[attr-defined]
    return render(request, "quotas/_fit.html", context)


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
        "can_withdraw": (own or policy.administers_pool) and allowed("withdraw", row.state),
        "shows_progress": row.state in (S.QUEUED, S.ALLOCATED, S.ENDED),
        "gpu_ms": row.charge_milli * row.duration_s if row.duration_s else None,
        "api_call": f"GET /api/v1/requests/{row.uid}/",
    }
    return render(request, "quotas/request_detail.html", context)


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
    ask = 0 if row.state == S.ALLOCATED else row.charge_milli
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
    """Withdraw, agree or not agree to a change; back to the request with what happened."""
    row = find_request(request, uid)
    common: dict[str, Any] = {"acting_user": actor_of(request), "policy": request.policy, "request": row}  # type: ignore[attr-defined]
    try:
        if act == "withdraw":
            request_withdraw(**common, reason=request.POST.get("reason", "").strip()[:500])
            messages.success(request, _("%(ref)s withdrawn.") % {"ref": row.ref})
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
        messages.error(request, str(error.detail))
    return HttpResponseRedirect(reverse("quotas:request-detail", args=[row.uid]))


__all__ = ["find_request", "subject_of"]
