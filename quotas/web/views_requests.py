"""Pages of requests: list, form with its panel, detail, and the acts of their requester. Acts are POST
only.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Exists, F, OuterRef, Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.timezone import get_current_timezone
from django.utils.translation import gettext as _
from django.utils.translation import pgettext
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.kernel.ids import uuid7
from portal.ops.actor import actor_of
from quotas.models import CapacityRequest, QuotaUsage, RequestDependency
from quotas.selectors.approvals import subject_of
from quotas.selectors.approvers import Deciders
from quotas.selectors.flavours import flavours_on_offer
from quotas.selectors.prices import general_prices
from quotas.selectors.requests import flavour_names, visible_requests, with_open_step
from quotas.selectors.series import progress_of_all
from quotas.services.requests import (
    request_change,
    request_save_draft,
    request_submit,
)
from quotas.transitions import allowed
from quotas.web import present
from quotas.web.fit_panel import panel
from quotas.web.request_form import RequestForm
from quotas.web.request_parts import ZONES
from quotas.web.words import weekdays

S = CapacityRequest.State
PAGE = 50
GROUPS: dict[str, list[str]] = {
    "open": [S.DRAFT, S.IN_APPROVAL, S.RETURNED, S.NEEDS_CONSENT, S.QUEUED, S.SERIES, S.ALLOCATED],
    "ended": [S.ENDED, S.REJECTED, S.WITHDRAWN],
    "all": list(S.values),
}


def find_request(request: HttpRequest, uid: uuid.UUID) -> CapacityRequest:
    """One request that the person may see, else 404: absent and forbidden look alike."""
    rows = with_open_step(visible_requests(request.policy))  # type: ignore[attr-defined]
    found = (
        rows.select_related("flavour__capacity", "department", "requester", "head", "cloned_from")
        .annotate(waits=Exists(RequestDependency.objects.filter(request=OuterRef("pk"))))
        .filter(uid=uid)
        .first()
    )
    if found is None:
        raise Http404
    return found


def current_prices() -> dict[int, int]:
    """The general price per GPU-hour now, by flavour id."""
    return general_prices(now())


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


def at_pool(rows: Iterable[CapacityRequest]) -> str:
    """Numbers of the rows that the pool knows more about: in line, or holding something."""
    return ",".join(str(r.pk) for r in rows if r.state == S.ALLOCATED or (r.state == S.QUEUED and not r.held))


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
    if state not in (*GROUPS, *CapacityRequest.State.values):
        state = "open"  # what is shown is what the filters say
    rows = visible_requests(policy)
    if of != "all":
        rows = rows.filter(requester=request.user)
    rows = rows.filter(state__in=GROUPS.get(state, [state]))
    if not text:
        rows = rows.filter(head=None)  # members are on the page of their series
    if text:
        query = (
            Q(purpose__icontains=text)
            | Q(requester__display_name__icontains=text)
            | Q(department__name__icontains=text)
        )
        if (number := text.upper().removeprefix("R-")).isdecimal():
            query |= Q(pk=int(number[:18]))
        rows = rows.filter(query)
    names = flavour_names()
    flavour = request.GET.get("flavour", "")
    flavour = flavour if flavour in names else ""
    if flavour:
        rows = rows.filter(Q(flavour__code=flavour) | Q(options__contains=[flavour]))
    page = Paginator(with_open_step(rows).order_by("-id"), PAGE).get_page(request.GET.get("page"))
    deciders = Deciders.of_page(policy)
    progress = progress_of_all([r for r in page if r.series])
    context = {
        "page": page,
        "rows": [present.row_of(r, names, deciders, progress) for r in page],
        "at_pool": at_pool(page),
        "of": of,
        "state": state,
        "q": text,
        "flavour": flavour,
        "flavours": names,
        "states": [("open", pgettext("request", "Open")), ("ended", _("Ended")), ("all", _("All"))],
        "reads_others": bool(policy.reads),
        "may_ask": bool(policy.asks_for),
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
        if error.code == "sent_already":  # whoever sends it once more now means it
            anew = request.POST.copy()
            anew["token"] = uuid7().hex
            form.data = anew
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
        "opened": form.opened(),
        "weekdays": weekdays(),
        "zones": list(dict.fromkeys([str(get_current_timezone()), *ZONES])),
    }
    return render(request, "quotas/request_form.html", context, status=status)


@login_required
@require_POST
def request_fit(request: HttpRequest) -> HttpResponse:
    """The panel beside the form (htmx); writes nothing."""
    form = make_form(request, data=request.POST)
    context = panel(form.values(), user=request.user, policy=request.policy, offered=form.offered)  # type: ignore[attr-defined]
    return render(request, "quotas/_fit.html", context)


__all__ = ["find_request", "subject_of"]
