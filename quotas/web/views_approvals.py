"""The approvers' queue and one decision. Reading never decides: decisions are POST with CSRF token only."""

from __future__ import annotations

import uuid
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of
from quotas.models import ApprovalStep, CapacityRequest, QuotaChange
from quotas.selectors.approvals import (
    LightRow,
    QueueRow,
    decided_steps,
    light_rows,
    open_rows,
    queue_steps,
    subject_of,
    visible_steps,
)
from quotas.selectors.approvers import Deciders
from quotas.selectors.requests import (
    decides_scope,
    flavour_names,
    other_open_asks,
    quota_bar,
    use_of_30_days,
)
from quotas.selectors.shapes import AskShape
from quotas.selectors.trees import INSTALLATION, parents_in, quota_trees
from quotas.services.approvals import step_decide, steps_approve
from quotas.web import present
from quotas.web.change_rows import change_rows
from quotas.web.views_preview import typed_amounts
from quotas.web.words import gpus, hours

PAGE = 50
TABS = ("mine", "team", "all", "quota", "done")


@login_required
@require_GET
def approvals(request: HttpRequest) -> HttpResponse:
    """The queue: mine, team, all, quota changes, decided."""
    return render(request, "quotas/approvals.html", _queue(request))


@login_required
@require_http_methods(["GET", "HEAD"])
def approval_detail(request: HttpRequest, uid: uuid.UUID) -> HttpResponse:
    """The queue with one step opened beside it."""
    step = visible_steps(request.policy).filter(uid=uid).first()  # type: ignore[attr-defined]
    if step is None:
        raise Http404
    context = _queue(request, chosen=step)
    context |= _detail(request, step, context["flavours"])
    return render(request, "quotas/approvals.html", context)


def _queue(request: HttpRequest, chosen: ApprovalStep | None = None) -> dict[str, Any]:
    """What the queue shows; for those who decide or read for others. Others see their asks on their own pages."""
    policy = request.policy  # type: ignore[attr-defined]
    policy.require(policy.reads or decides_scope(policy))
    tab = request.GET.get("q", "mine")
    tab = tab if tab in TABS else "mine"
    names = flavour_names()
    text, flavour = request.GET.get("s", "").strip(), request.GET.get("flavour", "")
    flavour = flavour if flavour in names else ""
    light = light_rows(policy)
    tabs: dict[str, list[LightRow]] = {
        "mine": [r for r in light if r.mine and r.state == "in_approval" and not r.is_change],
        "team": [r for r in light if (r.may.ok or r.may.why == "self_approval") and not r.is_change],
        "all": [r for r in light if not r.is_change],
        "quota": [r for r in light if r.is_change],
    }
    context: dict[str, Any] = {
        "tab": tab,
        "tabs": _tabs(tab, tabs),
        "s": text,
        "flavour": flavour,
        "flavours": names,
        "chosen": chosen,
        "may_delegate": policy.has("lead", "pool_admin", "finance"),
    }
    if tab == "done":
        rows = decided_steps(policy)
        if text:
            rows = rows.filter(_text_query(text))
        decided = Paginator(rows, PAGE).get_page(request.GET.get("page"))
        context["done"] = [_done_row(step, context["flavours"]) for step in decided]
        return {**context, "page": decided}
    pks = [r.pk for r in tabs[tab]]
    if text or flavour:
        steps = visible_steps(policy).filter(pk__in=pks)
        if text:
            steps = steps.filter(_text_query(text))
        if flavour:
            steps = steps.filter(Q(request__flavour__code=flavour) | Q(quota_change__flavour__code=flavour))
        pks = list(steps.values_list("pk", flat=True))
    page = Paginator(pks, PAGE if chosen is None else PAGE // 2).get_page(request.GET.get("page"))
    found = open_rows(policy, Deciders.of_page(policy), queue_steps(policy, list(page)))
    context["rows"] = _rows(policy, found, context["flavours"], bars=chosen is None)
    if chosen is None:
        shown = set(pks)
        context["cost"] = sum(r.cost_micro for r in tabs[tab] if r.pk in shown)
    return {**context, "page": page}


def _tabs(tab: str, rows: dict[str, list[LightRow]]) -> list[dict[str, Any]]:
    words = {
        "mine": _("Mine"),
        "team": _("Team"),
        "all": _("All"),
        "quota": _("Quota changes"),
        "done": _("Decided"),
    }
    base = reverse("quotas:approvals")
    return [
        {
            "url": f"{base}?q={name}",
            "label": words[name],
            "current": name == tab,
            "count": len(rows[name]) if name in rows else None,
        }
        for name in TABS
    ]


def _text_query(text: str) -> Q:
    query = Q(requester__display_name__icontains=text) | Q(request__purpose__icontains=text)
    query |= Q(request__department__name__icontains=text) | Q(quota_change__department__name__icontains=text)
    number = text.upper().removeprefix("R-").removeprefix("Q-")
    return query | Q(request_id=int(number[:18])) if number.isdecimal() else query


def ref_of(subject: CapacityRequest | QuotaChange) -> str:
    """R-17 or Q-3."""
    return subject.ref if isinstance(subject, CapacityRequest) else f"Q-{subject.pk}"


def _rows(policy: Any, rows: list[QueueRow], names: dict[str, str], *, bars: bool) -> list[dict[str, Any]]:
    """Rows with amounts and (``bars``) the quota after approval: one tree per flavour for all of them."""
    flavour_ids = {r.subject.flavour_id for r in rows if r.subject.flavour_id is not None}
    trees = quota_trees(flavour_ids, parents_in(policy.tree)) if flavour_ids and bars else {}
    out: list[dict[str, Any]] = []
    for row in rows:
        subject = row.subject
        item: dict[str, Any] = {
            "row": row,
            "step": row.step,
            "subject": subject,
            "ref": ref_of(subject),
            "bar": None,
        }
        if isinstance(subject, CapacityRequest):
            item |= {"amount": present.title_of(subject, names), "sub": present.hours(subject.duration_s)}
            item["cost"] = subject.cost_at_most_micro
            item["shape"] = f"{subject.flavour_id}-{AskShape.of(subject)}"
            item["since"] = subject.submitted_at
            item["consent"] = subject.state == "needs_consent"
        else:
            item |= {"amount": subject.flavour.name, "sub": _("quota change"), "since": subject.created_at}
        flavour = subject.flavour
        if isinstance(subject, CapacityRequest) and flavour is not None and bars:
            bar = quota_bar(trees[flavour.pk], flavour, subject.department_id)
            item |= {"bar": bar, "ask": subject.charge_milli, "after": bar.used + subject.charge_milli}
            item["borrows"] = max(0, min(subject.charge_milli, item["after"] - bar.guaranteed))
        out.append(item)
    return out


def _done_row(step: ApprovalStep, names: dict[str, str]) -> dict[str, Any]:
    subject = subject_of(step)
    amount = (
        present.title_of(subject, names) if isinstance(subject, CapacityRequest) else subject.flavour.name
    )
    return {"step": step, "subject": subject, "ref": ref_of(subject), "amount": amount}


def _detail(request: HttpRequest, step: ApprovalStep, names: dict[str, str]) -> dict[str, Any]:
    """What is needed to decide: the ask, its path, quota after approval, 30 days of use, other open asks."""
    policy = request.policy  # type: ignore[attr-defined]
    deciders = Deciders.of_page(policy)
    subject = subject_of(step)
    may = deciders.may(request.user.pk, step, subject)
    open_now = step.state == "open" and subject.state == "in_approval"
    context: dict[str, Any] = {
        "step": step,
        "subject": subject,
        "ref": ref_of(subject),
        "may": may,
        "open_now": open_now,
        "can_decide": may.ok and open_now,
        "behalf": deciders.names.get(may.behalf or 0, ""),
        "first": present.who_decides(step, subject, deciders),
    }
    if isinstance(subject, QuotaChange):
        return {
            **context,
            "change": subject,
            "change_rows": change_rows(subject),
            "change_steps": _change_steps(subject, deciders),
        }
    subject.shown_steps = list(  # type: ignore[attr-defined]
        subject.steps.select_related("department", "decided_by", "on_behalf_of").order_by("round", "position")
    )
    subtree = policy.tree.subtree(subject.department_id)
    person, group = use_of_30_days(user_id=subject.requester_id, department_ids=subtree)
    others = other_open_asks(subject)
    return {
        **context,
        "r": subject,
        "title": present.title_of(subject, names),
        "sub": present.sub_of(subject),
        "steps": present.path_of_request(subject, deciders),
        "after": _after(subject, policy),
        "person": person,
        "group": group,
        "others": [{"r": o, "title": present.title_of(o, names)} for o in others],
        "changeable": _changeable(subject),
        "gpu_ms": subject.charge_milli * subject.duration_s if subject.duration_s else None,
    }


def _change_steps(change: QuotaChange, deciders: Deciders) -> list[dict[str, Any]]:
    items = []
    for step in change.steps.select_related("department", "decided_by", "on_behalf_of").order_by(
        "round", "position"
    ):
        if step.state == "skipped":
            continue
        role = present.role_word(step.role)
        if step.decided_by is not None:
            tone = "done" if step.state == "approved" else "bad"
            items.append(
                {
                    "s": tone,
                    "title": step.get_state_display(),
                    "note": present.note(step.decided_by.get_full_name(), present.when(step.decided_at)),
                }
            )
        elif step.state == "open":
            items.append(
                {
                    "s": "now",
                    "title": role,
                    "note": present.note(
                        present.who_decides(step, change, deciders), present.when(step.due_at)
                    ),
                }
            )
        else:
            items.append({"s": "todo", "title": role, "note": ""})
    return items


def _after(subject: CapacityRequest, policy: Any) -> dict[str, Any] | None:
    """The quota bar with the ask, and what the levels above would have used."""
    flavour = subject.flavour
    if flavour is None:
        return None
    tree = quota_trees([flavour.pk], parents_in(policy.tree))[flavour.pk]
    bar = quota_bar(tree, flavour, subject.department_id)
    own = max(0, min(subject.charge_milli, bar.guaranteed - bar.used))
    levels = [
        (policy.tree.rows[pk].name, tree.counters[pk].total + subject.charge_milli, tree.guarantee(pk))
        for pk in reversed(policy.tree.ancestors(subject.department_id)[:-1])
    ]
    pool = tree.counters[INSTALLATION].total + subject.charge_milli
    levels.append((_("Pool"), pool, tree.guarantee(INSTALLATION)))
    return {
        "bar": bar,
        "ask": subject.charge_milli,
        "own": own,
        "borrowed": subject.charge_milli - own,
        "left": None if bar.limit is None else max(0, bar.limit - bar.used - subject.charge_milli),
        "levels": [{"name": n, "after": a, "of": g} for n, a, g in levels],
    }


def capitalised(word: str) -> str:
    """With a capital first letter, as labels have it."""
    return word[:1].upper() + word[1:]


def _changeable(subject: CapacityRequest) -> list[dict[str, Any]]:
    """The amounts that an approver may change, for the dialog."""
    names = {
        "whole": ["gpus_per_node", "nodes"],
        "fraction": ["fraction_milli", "fraction_mib"],
        "mig": ["mig_count"],
    }
    rows = [
        {
            "name": n,
            "label": present.field_word(n),
            "value": getattr(subject, n),
            "asked": getattr(subject, n),
        }
        for n in names.get(subject.shape, [])
        if getattr(subject, n)
    ]
    if subject.duration_s:
        rows.append(
            {
                "name": "hours",
                "label": _("Hours"),
                "value": f"{subject.duration_s / 3600:g}",
                "asked": hours(subject.duration_s),
            }
        )
    return rows


@login_required
@require_POST
def approval_decide(request: HttpRequest, uid: uuid.UUID) -> HttpResponse:
    """One decision. Problems come back to the page with what was typed; a second decider is told who was
    first.
    """
    step = visible_steps(request.policy).filter(uid=uid).first()  # type: ignore[attr-defined]
    if step is None:
        raise Http404
    decision = request.POST.get("decision", "")
    try:
        done = step_decide(
            acting_user=actor_of(request),
            policy=request.policy,  # type: ignore[attr-defined]
            step=step,
            decision=decision,
            comment=request.POST.get("comment", ""),
            changed=typed_amounts(request) if decision == "change" else None,
            override="override" in request.POST,
            version=int(v) if (v := request.POST.get("version", "")).isdecimal() else None,
        )
    except DomainError as error:
        if error.status == 403:
            raise
        context = _queue(request, chosen=step)
        step.refresh_from_db()
        context |= _detail(request, step, context["flavours"]) | {
            "error": error,
            "comment": request.POST.get("comment", ""),
            "retry": decision,
            "overridable": error.extra.get("overridable"),
        }
        return render(request, "quotas/approvals.html", context, status=error.status)
    words = {
        "approve": _("%(ref)s approved."),
        "change": _("%(ref)s approved with a change: the requester must agree."),
        "return": _("%(ref)s returned to its requester."),
        "reject": _("%(ref)s rejected."),
    }
    messages.success(request, words[decision] % {"ref": ref_of(subject_of(done))})
    return HttpResponseRedirect(_back(request))


def _back(request: HttpRequest) -> str:
    """Back to the same view of the queue: tab, filter and page stay."""
    target = request.POST.get("next", "")
    if target and url_has_allowed_host_and_scheme(target, allowed_hosts={request.get_host()}):
        return target
    return reverse("quotas:approvals")


@login_required
@require_POST
def approvals_bulk(request: HttpRequest) -> HttpResponse:
    """Approve several of one small shape; each row gets its own result."""
    uids: list[uuid.UUID] = []
    for text in request.POST.getlist("step"):
        try:
            uids.append(uuid.UUID(text))
        except ValueError:
            continue
    try:
        results = steps_approve(
            acting_user=actor_of(request),
            policy=request.policy,  # type: ignore[attr-defined]
            step_uids=uids,
            comment=request.POST.get("comment", "").strip()[:2000],
        )
    except DomainError as error:
        messages.error(request, "; ".join(str(p["detail"]) for p in error.errors) or str(error.detail))
        return HttpResponseRedirect(_back(request))
    good = [r for r in results if r.ok]
    bad = [r for r in results if not r.ok]
    if good:
        text = ngettext("%(n)s of %(all)s approved.", "%(n)s of %(all)s approved.", len(good))
        messages.success(request, text % {"n": len(good), "all": len(results)})
    for row in bad[:20]:
        messages.error(request, f"{row.label}: {row.detail}")
    return HttpResponseRedirect(_back(request))


__all__ = ["approval_decide", "approval_detail", "approvals", "approvals_bulk", "gpus"]
