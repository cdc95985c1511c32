"""Pages of incidents: what is wrong, what it means, what was done."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods, require_safe

from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of
from portal.ops.facts import fact_rows
from portal.ops.kinds import kind_of
from portal.ops.models import Incident
from portal.ops.selectors import incidents_visible
from portal.ops.services import incident_acknowledge, incident_close, incident_note
from portal.ops.web.audit import PAGES

PER_PAGE = 50
STATES = ("open", "closed", "all")


class NoteForm(forms.Form):
    """A remark, or the note that closes."""

    text = forms.CharField(
        label=gettext_lazy("Note"), max_length=2000, widget=forms.Textarea(attrs={"rows": 3})
    )


def _subject_address(incident: Incident) -> str:
    name = PAGES.get(incident.subject_type)
    if name is None or incident.subject_uid is None:
        return ""
    try:
        return reverse(name, args=[incident.subject_uid])
    except NoReverseMatch:
        return ""


def _allowed(request: HttpRequest) -> Any:
    policy = request.policy  # type: ignore[attr-defined]
    policy.require(policy.audits)
    return policy


@login_required
@require_safe
def incidents(request: HttpRequest) -> HttpResponse:
    """``/incidents/``: the open ones by severity, or the closed ones."""
    policy = _allowed(request)
    state = request.GET.get("state", "open")
    state = state if state in STATES else "open"
    rows = incidents_visible(policy, state)
    page = Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))
    context = {"page": page, "rows": [(i, kind_of(i.kind)) for i in page], "state": state}
    return render(request, "ops/incidents.html", context)


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def incident(request: HttpRequest, uid: UUID, act: str = "") -> HttpResponse:
    """``/incidents/<uid>/`` and, by POST, ``…/take/``, ``…/note/``, ``…/close/``."""
    policy = _allowed(request)
    found = incidents_visible(policy).filter(uid=uid).first()
    if found is None:
        raise Http404
    if act and request.method != "POST":
        return redirect("ops:incident", uid=uid)
    if act:
        policy.require(policy.administers_pool)
    form = NoteForm(request.POST if act in ("note", "close") else None)
    if act == "take":
        incident_acknowledge(acting_user=actor_of(request), incident=found)
        messages.success(request, _("You have it."))
        return redirect("ops:incident", uid=uid)
    if act and form.is_valid():
        try:
            if act == "close":
                incident_close(acting_user=actor_of(request), incident=found, note=form.cleaned_data["text"])
                messages.success(request, _("Closed."))
            else:
                incident_note(
                    incident=found,
                    kind="note",
                    actor=actor_of(request),
                    text=form.cleaned_data["text"].strip(),
                )
                messages.success(request, _("Note kept."))
            return redirect("ops:incident", uid=uid)
        except DomainError as error:
            form.add_error(None, error.detail)
    context = {
        "incident": found,
        "kind": kind_of(found.kind),
        "entries": found.entries.order_by("-id")[:100],
        "facts": fact_rows(found.facts),
        "address": _subject_address(found),
        "before": Incident.objects.filter(kind=found.kind, subject_uid=found.subject_uid)
        .exclude(pk=found.pk)
        .count()
        if found.subject_uid
        else None,
        "note_form": form if act == "note" else NoteForm(),
        "close_form": form if act == "close" else NoteForm(prefix=None),
        "open": {act: True} if act else {},
        "may_change": policy.administers_pool,
    }
    return render(request, "ops/incident.html", context, status=400 if act else 200)
