"""Quota pages: the tree with what-if, saving numbers, changes that departments ask for, import."""

from __future__ import annotations

import uuid
from decimal import Decimal, InvalidOperation
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from portal.accounts.models import Department
from portal.kernel.clock import now
from portal.kernel.errors import DomainError, Invalid
from portal.kernel.units import milli_from_gpus
from portal.ops.actor import actor_of
from quotas.models import GpuFlavour, QuotaChange, QuotaGrant, QuotaUsage
from quotas.selectors.approvers import Deciders
from quotas.selectors.grants import GrantNumbers, grant_numbers
from quotas.selectors.tree_rows import (
    flavours_with_quota,
    headline,
    quota_scope,
    shown_departments,
    tree_of,
    tree_rows,
    what_if,
)
from quotas.services.grant_import import quotas_import
from quotas.services.grants import check_numbers, grant_set, may_set_grants
from quotas.services.quota_changes import (
    lending_submit,
    may_ask_change,
    quota_change_submit,
    quota_change_withdraw,
)
from quotas.web import present
from quotas.web.change_rows import change_rows
from quotas.web.forms import local_input
from quotas.web.quota_forms import ChangeForm, GrantForm

FIELDS = ("guaranteed", "borrow_limit", "lend_limit", "hard_cap")


def _flavour(request: HttpRequest, flavours: list[GpuFlavour]) -> GpuFlavour | None:
    """The flavour asked for; otherwise the first of which the reader's department has a guarantee or a
    use.
    """
    wanted = request.GET.get("f", "") or request.GET.get("flavour", "")
    if chosen := next((f for f in flavours if f.code == wanted), None):
        return chosen
    home = request.user.home_department_id  # type: ignore[union-attr]
    own = QuotaUsage.objects.filter(department_id=home).filter(Q(guaranteed__gt=0) | Q(total__gt=0))
    ids = set(own.values_list("flavour_id", flat=True)) if home else set()
    return next((f for f in flavours if f.pk in ids), flavours[0] if flavours else None)


def _department(request: HttpRequest, scope: Any) -> Department | None:
    text = request.GET.get("d") or request.GET.get("department") or request.POST.get("department", "")
    try:
        uid = uuid.UUID(text)
    except ValueError:
        return None
    rows = request.policy.tree.rows.values()  # type: ignore[attr-defined]
    return next((d for d in rows if d.uid == uid and d.pk in scope), None)


@login_required
@require_GET
def quota_tree(request: HttpRequest) -> HttpResponse:
    """Guaranteed, used, borrowed and lent per department of one flavour; ``?d=`` opens one beside the
    tree.
    """
    policy = request.policy  # type: ignore[attr-defined]
    scope = quota_scope(policy)
    flavours = flavours_with_quota()
    flavour = _flavour(request, flavours)
    context: dict[str, Any] = {"flavours": flavours, "flavour": flavour, "moment": now()}
    if flavour is None or not scope:
        return render(request, "quotas/quota_tree.html", context)
    tree = tree_of(flavour, policy.tree)
    chosen = _department(request, scope)
    shown = shown_departments(policy.tree, scope, chosen.pk if chosen is not None else None)
    context |= {
        "rows": tree_rows(flavour, tree, policy.tree, scope, shown),
        "head": headline(flavour, tree),
        "sees_all": scope.everything,
        "chosen": chosen,
        "may_import": policy.administers_pool,
        "may_ask": bool(policy.scope("lead", "pool_admin")),
    }
    if chosen is not None:
        may_set = may_set_grants(policy, chosen.pk)
        numbers = next((r.numbers for r in context["rows"] if r.department.pk == chosen.pk), GrantNumbers())
        context |= {
            "form": GrantForm(initial=GrantForm.initial_of(numbers)) if may_set else None,
            "grants": _grants(chosen, flavour),
            "may_change": may_ask_change(policy, chosen.pk),
            "numbers": numbers,
        }
    return render(request, "quotas/quota_tree.html", context)


def _grants(department: Department, flavour: GpuFlavour) -> list[QuotaGrant]:
    rows = QuotaGrant.objects.filter(department=department, flavour=flavour).select_related(
        "lent_from__department"
    )
    return list(rows.order_by("-during")[:12])


def read_gpus(form: Any, name: str, problems: list[Any], *, empty: int | None) -> int | None:
    """A number of GPUs as typed (decimal), in milli; empty is unlimited or what is given."""
    text = form.typed(name)
    if text in ("", "∞"):
        return empty
    try:
        return milli_from_gpus(Decimal(text.replace(",", "")))
    except (ValueError, InvalidOperation):
        problems.append(
            {"pointer": name, "detail": _("GPUs with at most three decimals, for example 24 or 0.5.")}
        )
        return empty


def read_numbers(form: Any) -> GrantNumbers:
    """The five numbers of a form; Invalid with all problems."""
    problems: list[Any] = []
    values = {
        name: read_gpus(form, name, problems, empty=0 if name == "guaranteed" else None) for name in FIELDS
    }
    weight = form.typed("weight") or "1"
    if not weight.isdecimal() or len(weight) > 6:
        problems.append({"pointer": "weight", "detail": _("A whole number, 0 or more.")})
        weight = "1"
    if problems:
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=problems)
    return GrantNumbers(
        values["guaranteed"] or 0,
        values["borrow_limit"],
        values["lend_limit"],
        values["hard_cap"],
        int(weight),
    )


@login_required
@require_POST
def quota_what_if(request: HttpRequest) -> HttpResponse:
    """Effects of the typed numbers (htmx); saves nothing."""
    policy, form = request.policy, GrantForm(request.POST)  # type: ignore[attr-defined]
    chosen, flavour = _chosen(request)
    context: dict[str, Any] = {"chosen": chosen, "flavour": flavour}
    try:
        numbers = read_numbers(form)
        check_numbers(numbers)
        start = form.moment("starts_at")
        moment = start if hasattr(start, "tzinfo") and start is not None else now()
        context["effects"] = what_if(flavour, {chosen.pk: numbers}, policy.tree, moment)
    except DomainError as error:
        context["problems"] = [str(p["detail"]) for p in error.errors] or [str(error.detail)]
    return render(request, "quotas/_what_if.html", context)


def _chosen(request: HttpRequest) -> tuple[Department, GpuFlavour]:
    policy = request.policy  # type: ignore[attr-defined]
    chosen = _department(request, quota_scope(policy))
    flavour = GpuFlavour.objects.filter(code=request.POST.get("flavour", "")).first()
    if chosen is None or flavour is None:
        raise Http404
    return chosen, flavour


@login_required
@require_POST
def quota_save(request: HttpRequest) -> HttpResponse:
    """Put the numbers in force; sums that do not add up come back and can be overridden with a warning."""
    policy, form = request.policy, GrantForm(request.POST)  # type: ignore[attr-defined]
    chosen, flavour = _chosen(request)
    target = f"{reverse('quotas:quota-tree')}?f={flavour.code}&d={chosen.uid}"
    try:
        done = grant_set(
            acting_user=actor_of(request),
            policy=policy,
            department=chosen,
            flavour=flavour,
            **read_numbers(form).as_fields(),
            starts_at=_time(form, "starts_at"),
            ends_at=_time(form, "ends_at"),
            reason=form.typed("reason"),
            override="override" in request.POST,
        )
    except DomainError as error:
        if error.status == 403:
            raise
        form.take(error)
        tree = tree_of(flavour, policy.tree)
        scope = quota_scope(policy)
        context = {
            "flavours": flavours_with_quota(), "flavour": flavour, "moment": now(), "form": form, "chosen": chosen,
            "rows": tree_rows(
                flavour, tree, policy.tree, scope, shown_departments(policy.tree, scope, chosen.pk)
            ), "head": headline(flavour, tree),
            "sees_all": scope.everything, "grants": _grants(chosen, flavour),
            "may_change": may_ask_change(policy, chosen.pk), "overridable": error.extra.get("overridable"),
        }  # fmt: skip
        return render(request, "quotas/quota_tree.html", context, status=error.status)
    messages.success(
        request, _("%(name)s: quota of %(flavour)s saved.") % {"name": chosen.name, "flavour": flavour.name}
    )
    for warning in done.warnings:
        messages.warning(request, warning)
    return HttpResponseRedirect(target)


def _time(form: Any, name: str) -> Any:
    value = form.moment(name)
    if isinstance(value, str):
        raise Invalid.field(name, _("A date and time is needed here."))
    return value


@login_required
@require_http_methods(["GET", "POST"])
def quota_change_new(request: HttpRequest) -> HttpResponse:
    """A department asks for other numbers, or to be lent quota for a period."""
    policy = request.policy  # type: ignore[attr-defined]
    policy.require(policy.scope("lead", "pool_admin"))
    flavours = flavours_with_quota()
    if request.method == "POST":
        form = ChangeForm(request.POST, policy=policy, flavours=flavours)
        try:
            made = _submit_change(request, form, flavours)
        except DomainError as error:
            if error.status == 403:
                raise
            form.take(error)
            context = {"form": form, "overridable": error.extra.get("overridable")}
            return render(request, "quotas/change_form.html", context, status=error.status)
        messages.success(request, _("Q-%(n)s sent for approval.") % {"n": made.pk})
        return HttpResponseRedirect(reverse("quotas:quota-change", args=[made.uid]))
    form = ChangeForm(initial=_change_initial(request, flavours), policy=policy, flavours=flavours)
    part = request.GET.get("part") == "numbers"
    return render(
        request, "quotas/_change_numbers.html" if part else "quotas/change_form.html", {"form": form}
    )


def _change_initial(request: HttpRequest, flavours: list[GpuFlavour]) -> dict[str, Any]:
    """The form with the numbers in force of the department and flavour asked for; otherwise of the reader's own
    department, or of the first that the reader may ask for.
    """
    policy = request.policy  # type: ignore[attr-defined]
    scope = policy.scope("lead", "pool_admin")
    chosen, flavour = _department(request, scope), _flavour(request, flavours)
    if chosen is None:
        home = request.user.home_department_id  # type: ignore[union-attr]
        mine = [row for _depth, row in policy.tree.ordered() if row.is_open and row.pk in scope]
        chosen = next((row for row in mine if row.pk == home), mine[0] if mine else None)
    initial: dict[str, Any] = {
        "kind": request.GET.get("kind", "numbers"),
        "flavour": flavour.code if flavour else "",
    }
    if chosen is None or flavour is None:
        return initial
    numbers = grant_numbers(chosen.pk, flavour.pk, now()) or GrantNumbers()
    return {**initial, "department": str(chosen.uid), **GrantForm.initial_of(numbers)}


def _submit_change(request: HttpRequest, form: ChangeForm, flavours: list[GpuFlavour]) -> QuotaChange:
    policy = request.policy  # type: ignore[attr-defined]
    rows = {str(d.uid): d for d in policy.tree.rows.values()}
    department = rows.get(form.typed("department"))
    flavour = next((f for f in flavours if f.code == form.typed("flavour")), None)
    if department is None:
        raise Invalid.field("department", _("Choose a department."))
    if flavour is None:
        raise Invalid.field("flavour", _("Choose a flavour."))
    common: dict[str, Any] = {
        "acting_user": actor_of(request), "policy": policy, "department": department, "flavour": flavour,
        "purpose": form.typed("purpose"), "starts_at": _time(form, "starts_at"),
    }  # fmt: skip
    ends_at = _time(form, "ends_at")
    if form.typed("kind") != "lending":
        return quota_change_submit(
            **common, asked=read_numbers(form), ends_at=ends_at, override="override" in request.POST
        )
    lender = rows.get(form.typed("lender"))
    if lender is None:
        raise Invalid.field("lender", _("Choose the department that lends."))
    if ends_at is None:
        raise Invalid.field("ends_at", _("A lending has an end."))
    problems: list[Any] = []
    amount = read_gpus(form, "amount", problems, empty=0)
    if problems:
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=problems)
    return lending_submit(**common, lender=lender, amount_milli=amount or 0, ends_at=ends_at)


def find_change(request: HttpRequest, uid: uuid.UUID) -> QuotaChange:
    """One quota change that the person may see, else 404."""
    policy = request.policy  # type: ignore[attr-defined]
    row = (
        QuotaChange.objects.select_related("department", "flavour", "requester", "lender")
        .filter(uid=uid)
        .first()
    )
    scope = policy.reads
    if row is None or not (
        row.requester_id == request.user.pk or row.department_id in scope or (row.lender_id or -1) in scope
    ):
        raise Http404
    return row


@login_required
@require_GET
def quota_change(request: HttpRequest, uid: uuid.UUID) -> HttpResponse:
    """What was asked, in force and granted, per field; who decided; kept forever."""
    row = find_change(request, uid)
    deciders = Deciders.of_page(request.policy)  # type: ignore[attr-defined]
    steps = list(
        row.steps.select_related("department", "decided_by", "on_behalf_of").order_by("round", "position")
    )
    step = next((s for s in steps if s.state == "open"), None)
    may = deciders.may(request.user.pk, step, row) if step is not None else None
    context = {
        "change": row,
        "rows": change_rows(row),
        "decisions": [s for s in steps if s.decided_by is not None],
        "step": step,
        "may": may,
        "first": present.who_decides(step, row, deciders) if step is not None else "",
        "can_withdraw": row.requester_id == request.user.pk and row.state in ("in_approval", "returned"),
    }
    return render(request, "quotas/change_detail.html", context)


@login_required
@require_GET
def quota_change_list(request: HttpRequest) -> HttpResponse:
    """All changes of the departments that the person reads, and own ones."""
    policy = request.policy  # type: ignore[attr-defined]
    rows = QuotaChange.objects.filter(
        policy.reads.q() | policy.reads.q("lender_id")
    ) | QuotaChange.objects.filter(requester=request.user)
    rows = rows.select_related("department", "flavour", "requester", "lender").order_by("-id").distinct()
    page = Paginator(rows, 50).get_page(request.GET.get("page"))
    return render(
        request,
        "quotas/change_list.html",
        {"page": page, "may_ask": bool(policy.scope("lead", "pool_admin"))},
    )


@login_required
@require_POST
def quota_change_act(request: HttpRequest, uid: uuid.UUID, act: str) -> HttpResponse:
    """Withdraw a change."""
    row = find_change(request, uid)
    if act != "withdraw":
        raise Http404
    try:
        quota_change_withdraw(acting_user=actor_of(request), policy=request.policy, change=row)  # type: ignore[attr-defined]
        messages.success(request, _("Q-%(n)s withdrawn.") % {"n": row.pk})
    except DomainError as error:
        if error.status == 403:
            raise
        messages.error(request, str(error.detail))
    return HttpResponseRedirect(reverse("quotas:quota-change", args=[row.uid]))


@login_required
@require_http_methods(["GET", "POST"])
def quota_import(request: HttpRequest) -> HttpResponse:
    """Quotas from CSV or XLSX: a dry run first, errors by row and column, all or nothing."""
    policy = request.policy  # type: ignore[attr-defined]
    policy.require(policy.administers_pool)
    context: dict[str, Any] = {}
    status = 200
    if request.method == "POST":
        file = request.FILES.get("file")
        try:
            if file is None:
                raise Invalid.field("file", _("Choose a CSV or XLSX file."))
            result = quotas_import(
                acting_user=actor_of(request), policy=policy, data=file.read(), name=file.name or "",
                dry_run="save" not in request.POST,
            )  # fmt: skip
            context["result"] = result
            if not result.dry_run:
                messages.success(request, _("%(n)s quotas set.") % {"n": len(result.rows)})
                return HttpResponseRedirect(reverse("quotas:quota-tree"))
        except DomainError as error:
            context["error"], status = error, error.status
    return render(request, "quotas/quota_import.html", context, status=status)


__all__ = ["local_input", "quota_change", "quota_tree"]
