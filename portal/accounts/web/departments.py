"""Pages about the department tree: the tree, one department, and what administrators do there."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_safe

from portal.accounts.effects import Effect, department_effects
from portal.accounts.models import Department
from portal.accounts.policy import Policy
from portal.accounts.selectors.departments import bindings_at, department_visible, names_over_time, tree_rows
from portal.accounts.selectors.people import people_list
from portal.accounts.services import (
    department_close,
    department_close_effects,
    department_create,
    department_move,
    department_reopen,
    department_update,
)
from portal.accounts.web.common import PER_PAGE, policy_required, section_tabs
from portal.accounts.web.forms import DepartmentForm, MoveForm, ReasonForm, department_named, take_errors
from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of
from portal.ops.selectors import history_of


@login_required
@require_safe
@policy_required
def departments(request: HttpRequest, policy: Policy) -> HttpResponse:
    """``/departments/``: the tree."""
    tabs = section_tabs(policy, "departments")
    closed = request.GET.get("closed") == "1"
    search = request.GET.get("q", "").strip().casefold()[:100]
    rows = tree_rows(policy, closed=closed)
    if search:
        rows = [
            r for r in rows if any(search in t.casefold() for t in (r.department.name, r.department.code))
        ]
    context = {
        "tabs": tabs,
        "page": Paginator(rows, PER_PAGE).get_page(request.GET.get("page")),
        "closed": closed,
        "search": search,
        "may_change": policy.administers_people,
    }
    return render(request, "accounts/departments.html", context)


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
@policy_required
def department_new(request: HttpRequest, policy: Policy) -> HttpResponse:
    """``/departments/new/``."""
    policy.require(policy.administers_people)
    below = department_named(policy.tree, request.GET.get("below", ""))
    start = {"parent": below.code if below is not None else ""}
    form = DepartmentForm(request.POST or None, tree=policy.tree, new=True, initial=start)
    if request.method == "POST" and form.is_valid():
        try:
            row = department_create(acting_user=actor_of(request), **form.cleaned_data)
        except DomainError as error:
            take_errors(form, error)
        else:
            messages.success(request, _("Department added."))
            return redirect("accounts:department", uid=row.uid)
    return render(
        request, "accounts/department_new.html", {"form": form}, status=400 if form.is_bound else 200
    )


def _forms(request: HttpRequest, row: Department, policy: Policy, act: str) -> dict[str, Any]:
    data: Any = {act: request.POST} if request.method == "POST" else {}
    parent = policy.tree.rows[row.parent_id] if row.parent_id is not None else None
    return {
        "edit": DepartmentForm(
            data.get("edit"),
            tree=policy.tree,
            initial={"name": row.name, "cost_center": row.cost_center},
            prefix="edit",
        ),
        "move": MoveForm(
            data.get("move"),
            tree=policy.tree,
            moving=row,
            initial={"parent": parent.code if parent is not None else ""},
            prefix="move",
        ),
        "close": ReasonForm(data.get("close"), prefix="close"),
    }


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
@policy_required
def department(request: HttpRequest, policy: Policy, uid: UUID, act: str = "") -> HttpResponse:
    """``/departments/<uid>/`` and, by POST, ``…/edit/``, ``…/move/``, ``…/close/``, ``…/reopen/``."""
    row = department_visible(policy, uid)
    if row is None:
        raise Http404
    if act and request.method != "POST":
        return redirect("accounts:department", uid=uid)
    if act:
        policy.require(policy.administers_people)
    forms = _forms(request, row, policy, act)
    form = forms.get(act)
    if act and (form is None or form.is_valid()):
        try:
            done = _carry_out(request, row, act, form)
        except DomainError as error:
            if form is None:
                raise
            take_errors(form, error)
        else:
            messages.success(request, done)
            return redirect("accounts:department", uid=uid)
    context = {
        "department": row,
        "path": [policy.tree.rows[pk] for pk in policy.tree.ancestors(row.pk)],
        "children": [policy.tree.rows[pk] for pk in policy.tree.children.get(row.pk, [])],
        "below": len(policy.tree.subtree(row.pk)) - 1,
        "bindings": bindings_at(row)[:50],
        "members": people_list(policy, department_id=row.pk, state="active")[:20],
        "names": names_over_time(row)[:10],
        "history": history_of(row.uid, 12),
        "forms": forms,
        "open": {act: True} if act else {},
        "may_change": policy.administers_people,
        "lost": [] if row.is_open else [e for e in department_effects("reopen", [row.pk]) if e.count],
    }
    return render(request, "accounts/department.html", context, status=400 if act else 200)


@login_required
@require_safe
@policy_required
def effects(request: HttpRequest, policy: Policy, uid: UUID, act: str) -> HttpResponse:
    """What closing or moving it would touch: fetched when its dialog opens."""
    row = department_visible(policy, uid)
    if row is None or act not in ("close", "move"):
        raise Http404
    policy.require(policy.administers_people)
    if act == "close":
        found = department_close_effects(row)
    else:
        below = policy.tree.subtree(row.pk)
        found = [Effect(_("Departments below"), len(below) - 1), *department_effects("move", below)]
    return render(request, "accounts/_effects.html", {"effects": found})


def _carry_out(request: HttpRequest, row: Department, act: str, form: Any) -> str:
    """Call the service behind `act`; returns what to say."""
    acting = actor_of(request)
    if act == "edit":
        department_update(acting_user=acting, department=row, **form.cleaned_data)
        return _("Saved. Reports of the time before keep the old name.")
    if act == "move":
        department_move(acting_user=acting, department=row, parent=form.cleaned_data["parent"])
        return _("Moved.")
    if act == "close":
        department_close(acting_user=acting, department=row, reason=form.cleaned_data["reason"])
        return _(
            "Closed. What runs goes on; nobody asks on its behalf any more. Its quota has ended and does not come back "
            "by itself."
        )
    if act == "reopen":
        lost = any(e.count for e in department_effects("reopen", [row.pk]))
        department_reopen(acting_user=acting, department=row)
        if lost:
            return _(
                "Open again, without quota: what it had ended when it was closed. Set it anew under Quotas."
            )
        return _("Open again.")
    raise Http404
