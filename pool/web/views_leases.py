"""Pages about allocations: list, one allocation, its log, extend, release; fragments for the request pages."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import pgettext
from django.views.decorators.http import require_GET, require_POST

from pool.models import Allocation, IdleWatch, QueueEntry, ReclaimConsent
from pool.selectors import pages
from pool.selectors.logs import log_pieces, log_tail, member_asked
from pool.services import allocations
from pool.services.idle import still_needed
from pool.services.modes import consent_set
from pool.services.reclaim_rules import rules_active
from pool.web.home_cards import home_card
from pool.web.ladder_words import ladder_steps
from pool.web.reasons import explain, explain_basis
from portal.accounts.middleware import policy_of_request
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.kernel.streaming import streamed_text
from portal.ops.actor import actor_of
from portal.web import formats
from quotas.models import CapacityRequest

PER_PAGE = 50


def _allocation(request: HttpRequest, uid: Any) -> Allocation:
    found = pages.allocation_seen(policy_of_request(request), uid)
    if found is None:
        raise Http404
    return found


def _with_output(request: HttpRequest, uid: Any) -> Allocation:
    """An allocation whose output the person may read; Refused for one that they may only see."""
    found, policy = _allocation(request, uid), policy_of_request(request)
    policy.require(_reads_output(policy, found))
    return found


def _reads_output(policy: Policy, allocation: Allocation) -> bool:
    return policy.reads_output(holder_id=allocation.holder_id, department_id=allocation.department_id)


@login_required
@require_GET
def lease_list(request: HttpRequest) -> HttpResponse:
    """Allocations: `whose` is mine (default) or all that I may see; `state` open (default), ended or all."""
    policy = policy_of_request(request)
    whose = request.GET.get("whose", "mine" if not policy.administers_pool else "all")
    state = request.GET.get("state", "open")
    found = pages.allocations_listed(policy)
    if whose == "mine":
        found = found.filter(holder=request.user)
    if state == "open":
        found = found.exclude(state=Allocation.State.ENDED)
    elif state == "ended":
        found = found.filter(state=Allocation.State.ENDED)
    reason = request.GET.get("reason", "")
    if reason in Allocation.EndReason.values:
        found = found.filter(end_reason=reason)
    page = Paginator(found.order_by("-id"), PER_PAGE).get_page(request.GET.get("page"))
    context = {
        "page_obj": page,
        "whose": whose,
        "state": state,
        "sees_others": bool(policy.reads),
        "reasons": Allocation.EndReason.choices,
        "reason": reason,
        "whose_options": [("mine", _("Mine")), ("all", _("All I may see"))],
        "state_options": [("open", pgettext("lease", "Open")), ("ended", _("Ended")), ("all", _("All"))],
    }
    return render(request, "pool/lease_list.html", context)


@login_required
@require_GET
def allocation_detail(request: HttpRequest, uid: Any) -> HttpResponse:
    """One allocation: time left, live figures (fragment), log, GPUs, where it runs, history, extend, release."""
    allocation = _allocation(request, uid)
    policy = policy_of_request(request)
    allocation.uid_text = str(allocation.uid)  # type: ignore[attr-defined]
    members = list(allocation.members.all())
    mine = allocation.holder_id == request.user.pk
    reads_output = _reads_output(policy, allocation)
    context = {
        "allocation": allocation,
        "ask": allocation.request,
        "members": members,
        "leases": list(allocation.leases.all()),
        "node": members[0].node if members else None,
        "events": list(allocation.events.order_by("-id")[:50]),
        **_ladder(allocation, policy, mine),
        "reads_output": reads_output,
        "tail": log_tail(allocation_id=allocation.pk, member=0) if reads_output else None,
        "mine": mine,
        "opened": {request.GET.get("do", ""): True},
        "may_release": allocation.is_open and (mine or policy.administers_pool),
        "may_extend": allocation.is_open and mine and allocation.expires_at is not None,
        "may_revoke": allocation.is_open and not mine and policy.administers_pool,
        "runs_as_agent": any(m.node.run_as_root is False for m in members),
        "away": next((m.node.cluster for m in members if m.node.cluster.away_since), None)
        if allocation.state == Allocation.State.STOPPING
        else None,
    }
    return render(request, "pool/allocation_detail.html", context)


def _ladder(allocation: Allocation, policy: Policy, mine: bool) -> dict[str, Any]:
    """Its newest case with the steps, what is known of its idleness, and whether it takes part in a roll-out."""
    case = (
        allocation.reclaim_cases.select_related("for_request__department", "window").order_by("-id").first()
    )
    other = case.for_request if case is not None else None
    watch = IdleWatch.objects.filter(allocation=allocation).first() if allocation.is_open else None
    return {
        "case": case,
        "ladder": ladder_steps(case) if case is not None else [],
        "sees_for": other is not None
        and (other.requester_id == policy.user.pk or other.department_id in policy.reads),
        "idle": watch if watch is not None and watch.warned_at is not None else None,
        "may_need": mine and watch is not None and watch.state == IdleWatch.State.IDLE,
        "excuses_left": max(0, rules_active()[1].still_needed_times - watch.excuses)
        if watch is not None
        else 0,
        "consents": ReclaimConsent.objects.filter(request=allocation.request_id).exists()
        if mine and allocation.is_open
        else None,
    }


def _back(request: HttpRequest, allocation: Allocation) -> HttpResponseRedirect:
    target = request.POST.get("next", "")
    if target and url_has_allowed_host_and_scheme(target, allowed_hosts={request.get_host()}):
        return HttpResponseRedirect(target)
    return HttpResponseRedirect(reverse("pool:allocation", args=[allocation.uid]))


@login_required
@require_POST
def allocation_act(request: HttpRequest, uid: Any, act: str) -> HttpResponse:
    """extend, release, revoke, still-needed, consent, no-consent: by POST only; the service decides."""
    allocation = _allocation(request, uid)
    actor = actor_of(request)
    try:
        if act == "release":
            allocations.allocation_release(
                acting_user=actor, allocation=allocation, reason=request.POST.get("reason", "")[:500]
            )
            messages.success(request, _("%(ref)s is being given back.") % {"ref": allocation.ref})
        elif act == "extend":
            try:
                hours = float(request.POST.get("hours", ""))
            except ValueError:
                hours = 0.0
            if not 1 <= hours <= 24 * 90:
                messages.error(request, _("Give the extension in hours, between 1 and 2160."))
                return _back(request, allocation)
            allocations.allocation_extend(acting_user=actor, allocation=allocation, extra_s=int(hours * 3600))
            messages.success(request, _("%(ref)s was extended.") % {"ref": allocation.ref})
        elif act == "revoke":
            allocations.allocation_revoke(
                acting_user=actor, allocation=allocation, reason=request.POST.get("reason", "")[:500]
            )
            messages.success(request, _("%(ref)s is being revoked.") % {"ref": allocation.ref})
        elif act == "still-needed":
            watch = still_needed(acting_user=actor, allocation=allocation)
            messages.success(
                request,
                _("%(ref)s is not taken back as idle before %(until)s.")
                % {"ref": allocation.ref, "until": formats.moment(watch.excused_until or now())},
            )
        elif act in ("consent", "no-consent"):
            consent_set(acting_user=actor, request=allocation.request, willing=act == "consent")
            messages.success(request, _("Noted."))
        else:
            raise Http404
    except DomainError as error:
        messages.error(request, " ".join(str(p["detail"]) for p in error.errors) or str(error.detail))
    return _back(request, allocation)


@login_required
@require_GET
def allocation_log(request: HttpRequest, uid: Any) -> HttpResponse:
    """The tail of one member's output as a fragment that refreshes itself while the work runs."""
    allocation = _with_output(request, uid)
    member = member_asked(request.GET.get("member", ""))
    context = {
        "allocation": allocation,
        "member": member,
        "tail": log_tail(allocation_id=allocation.pk, member=member),
        "running": allocation.is_open,
    }
    return render(request, "pool/_log.html", context)


@login_required
@require_GET
def allocation_log_download(request: HttpRequest, uid: Any) -> StreamingHttpResponse:
    """The whole kept output of one member as text."""
    allocation = _with_output(request, uid)
    member = member_asked(request.GET.get("member", ""))
    response = streamed_text(request, log_pieces(allocation_id=allocation.pk, member=member))
    response["Content-Disposition"] = f'attachment; filename="{allocation.ref}-{member}.log"'
    return response


@login_required
@require_GET
def home_allocations(request: HttpRequest) -> HttpResponse:
    """Cards of my open allocations, for the researcher's home, and what is about to be taken back above them."""
    cards = [home_card(a) for a in pages.allocations_held(request.user.pk)]
    idle = [c for c in cards if c["idle"]]
    most = rules_active()[1].still_needed_times if idle else 0
    for card in idle:
        card["left"] = max(0, most - card["idle"].excuses)
    return render(request, "pool/_home_allocations.html", {"cards": cards, "here": reverse("home")})


@login_required
@require_GET
def queue_brief(request: HttpRequest) -> HttpResponse:
    """Of queued requests (`of`: their numbers) place, reason and likely start; of those that hold something what it is
    and until when. Put into the lines of a list that has them."""
    policy = policy_of_request(request)
    numbers = [
        int(n) for n in request.GET.get("of", "").split(",")[:PER_PAGE] if n.isdecimal() and len(n) < 19
    ]
    rows = [
        {"entry": e, "why": explain(e.reason, e.figures, e.request.flavour.name if e.request.flavour else ""),
         "basis": explain_basis(e.basis, e.figures)}
        for e in pages.queue_of(policy, numbers)
    ]  # fmt: skip
    held = (
        pages.allocations_visible(policy).filter(request_id__in=numbers).exclude(state=Allocation.State.ENDED)
    )
    return render(request, "pool/_queue_brief.html", {"rows": rows, "held": list(held)})


@login_required
@require_GET
def request_progress(request: HttpRequest, uid: Any) -> HttpResponse:
    """Why a request waits, or what it got: the scheduler's part of the request page."""
    policy = policy_of_request(request)
    ask = CapacityRequest.objects.filter(uid=uid).select_related("flavour", "department").first()
    if ask is None or not (ask.requester_id == request.user.pk or ask.department_id in policy.reads):
        raise Http404
    entry = (
        QueueEntry.objects.filter(request=ask).first() if ask.state == CapacityRequest.State.QUEUED else None
    )
    allocation = (
        Allocation.objects.filter(request=ask)
        .select_related("flavour")
        .prefetch_related("members__node", "leases__gpu")
        .order_by("-id")
        .first()
    )
    context: dict[str, Any] = {"ask": ask, "entry": entry, "allocation": allocation}
    if entry is not None:
        context["why"] = explain(entry.reason, entry.figures, ask.flavour.name if ask.flavour else "")
        context["basis"] = explain_basis(entry.basis, entry.figures)
        before = entry.ahead[:3]
        found = CapacityRequest.objects.only("id", "uid", "requester_id", "department_id").in_bulk(before)
        ahead = [found[pk] for pk in before if pk in found]
        context["ahead"] = [
            {
                "ref": a.ref,
                "uid": a.uid,
                "seen": a.requester_id == request.user.pk or a.department_id in policy.reads,
            }
            for a in ahead
        ]
    return render(request, "pool/_request_progress.html", context)


@login_required
@require_GET
def fit(request: HttpRequest) -> HttpResponse:
    """Free now per flavour, for the request form's panel."""
    free = pages.free_by_flavour()
    rows = [(c.flavour, free.get(c.flavour_id, 0), c) for c in pages.capacities()]
    wanted = request.GET.get("flavour", "")
    if wanted:
        rows = [r for r in rows if r[0].code == wanted or str(r[0].pk) == wanted]
    return render(request, "pool/_fit.html", {"rows": rows})
