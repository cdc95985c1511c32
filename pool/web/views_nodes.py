"""Pages about nodes: list, node, decisions about it, operations, import, enrolment."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from pool.models import Cluster, Gpu, Node
from pool.selectors import pages
from pool.selectors.datasets import datasets_of_node
from pool.selectors.reclaim import windows_of
from pool.services import conditions, nodes
from pool.services.enrolment import agent_token_revoke
from pool.services.nodes import node_work
from portal.accounts.middleware import pool_reader
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of
from portal.ops.models import AuditEvent, Incident
from portal.web import formats

PER_PAGE = 50


@login_required
@require_GET
def node_list(request: HttpRequest) -> HttpResponse:
    """All nodes, filtered by the URL: q, site, cluster, state."""
    found = pages.nodes_listed()
    q = request.GET.get("q", "").strip()[:100]
    if q:
        found = found.filter(
            Q(name__icontains=q) | Q(gpus__model_name__icontains=q) | Q(rack__iexact=q)
        ).distinct()
    if site := request.GET.get("site", ""):
        found = found.filter(cluster__site__code=site)
    if cluster := request.GET.get("cluster", ""):
        found = found.filter(cluster__code=cluster)
    state = request.GET.get("state", "")
    if state in Node.Health.values:
        found = found.filter(health=state)
    elif state in Node.Schedulable.values:
        found = found.filter(schedulable=state)
    page = Paginator(found, PER_PAGE).get_page(request.GET.get("page"))
    models: dict[int, list[str]] = {}
    for node_id, model in (
        Gpu.objects.filter(node__in=[n.pk for n in page.object_list])
        .exclude(condition=Gpu.Condition.RETIRED)
        .order_by("node_id", "model_name")
        .values_list("node_id", "model_name")
        .distinct()
    ):
        models.setdefault(node_id, []).append(model)
    for node in page.object_list:
        node.models = ", ".join(models.get(node.pk, []))  # type: ignore[attr-defined]
    sites, clusters = pages.sites_and_clusters()
    states = [
        ("", _("All states")),
        *[(v, label) for v, label in Node.Health.choices],
        *[(v, label) for v, label in Node.Schedulable.choices if v not in ("open", "retired")],
    ]
    context = {
        "page_obj": page,
        "sites": sites,
        "clusters": clusters,
        "q": q,
        "states": states,
        "state": state,
    }
    return render(request, "pool/node_list.html", context)


def _node(uid: Any) -> Node:
    node = pages.node_seen(uid)
    if node is None:
        raise Http404
    return node


@login_required
@require_GET
def node_detail(request: HttpRequest, uid: Any) -> HttpResponse:
    """One node: hardware, who is on it, live figures (fragment), what people decided about it."""
    node = _node(uid)
    policy: Policy = request.policy  # type: ignore[attr-defined]
    work = node_work(node)
    visible = {a.pk: a.holder_id == request.user.pk or a.department_id in policy.reads for a in work}
    gpus = list(node.gpus.all())
    held = 0
    for gpu in gpus:
        gpu.pk_text = str(gpu.pk)  # type: ignore[attr-defined]
        gpu.slices = [s for s in gpu.slices_all if s.gone_at is None]  # type: ignore[attr-defined]
        leases = gpu.open_leases  # type: ignore[attr-defined]
        held += min(1000, sum(lease.charge for lease in leases))
        for lease in leases:
            lease.seen = visible.get(lease.allocation_id, False)
    history = (
        AuditEvent.objects.filter(object_uid=node.uid, action__startswith="node.").order_by("-id")[:10]
        if policy.reads
        else []
    )
    rest_ms = 0
    for allocation in work:
        allocation.seen = visible[allocation.pk]  # type: ignore[attr-defined]
        if allocation.expires_at:
            left = max(0, int((allocation.expires_at - now()).total_seconds() * 1000))
            rest_ms += left * allocation.charge_milli // 1000
    open_until = [a.expires_at for a in work if a.expires_at]
    node.uid_text = str(node.uid)  # type: ignore[attr-defined]
    context = {
        "node": node,
        "gpus": gpus,
        "held_milli": held,
        "total_milli": 1000 * len(gpus),
        "cpu_milli": sum(a.host_cpu_milli or 0 for a in work),  # type: ignore[attr-defined]
        "memory_mib": sum(a.host_memory_mib or 0 for a in work),  # type: ignore[attr-defined]
        "work": work,
        "people": len({a.holder_id for a in work}),
        "rest_ms": rest_ms,
        "empty_by": max(open_until) if open_until and len(open_until) == len(work) else None,
        "history": history,
        "may_act": policy.administers_pool,
        "bad": [g for g in gpus if g.condition != "ok"],
        "links": any(g.nvlink for g in gpus),
        "windows": windows_of(node),
        "datasets": datasets_of_node(policy, node),
    }
    return render(request, "pool/node_detail.html", context)


@login_required
@require_POST
def node_act(request: HttpRequest, uid: Any, act: str) -> HttpResponse:
    """cordon, uncordon, drain, maintenance, revoke-agent, retire: with a reason, by POST only."""
    node = get_object_or_404(Node, uid=uid)
    actor = actor_of(request)
    reason = request.POST.get("reason", "")[:1000]
    try:
        minutes = max(0, min(10080, int(request.POST.get("minutes") or 30)))
    except ValueError:
        minutes = 30
    try:
        if act == "cordon":
            nodes.node_cordon(acting_user=actor, node=node, reason=reason)
            text = _("%(node)s is cordoned: nothing new is placed on it.")
        elif act == "uncordon":
            nodes.node_uncordon(acting_user=actor, node=node, reason=reason)
            text = _("%(node)s is open again.")
        elif act == "drain":
            touched = nodes.node_drain(acting_user=actor, node=node, reason=reason, grace_s=minutes * 60)
            text = _("%(node)s is draining; %(count)d allocations were given notice.")
            messages.success(request, text % {"node": node.name, "count": len(touched)})
            return HttpResponseRedirect(reverse("pool:node", args=[node.uid]))
        elif act == "maintenance":
            until = now() + timedelta(minutes=minutes)
            nodes.node_maintenance(acting_user=actor, node=node, reason=reason, until=until)
            text = _("%(node)s is in maintenance.")
        elif act == "revoke-agent":
            agent_token_revoke(acting_user=actor, node=node, reason=reason)
            text = _("The token of %(node)s is revoked: its agent is refused until it enrols again.")
        elif act == "retire":
            nodes.node_retire(acting_user=actor, node=node, reason=reason)
            text = _("%(node)s has left the pool.")
        else:
            raise Http404
        messages.success(request, text % {"node": node.name})
    except DomainError as error:
        messages.error(request, " ".join(str(p["detail"]) for p in error.errors) or str(error.detail))
    return HttpResponseRedirect(reverse("pool:node", args=[node.uid]))


@login_required
@require_POST
def gpu_act(request: HttpRequest, uid: Any, act: str) -> HttpResponse:
    """Cordon or uncordon one card, or declare it healthy again."""
    gpu = get_object_or_404(Gpu.objects.select_related("node"), uid=uid)
    actor = actor_of(request)
    reason = request.POST.get("reason", "")[:1000]
    try:
        if act in ("cordon", "uncordon"):
            conditions.gpu_cordon(acting_user=actor, gpu=gpu, cordoned=act == "cordon", reason=reason)
        elif act == "healthy":
            nodes.require_pool_admin(actor)
            conditions.gpu_condition_set(acting_user=actor, gpu=gpu, condition="ok", reason=reason[:64])
        else:
            raise Http404
        messages.success(
            request, _("Done for GPU %(index)d of %(node)s.") % {"index": gpu.index, "node": gpu.node.name}
        )
    except DomainError as error:
        messages.error(request, " ".join(str(p["detail"]) for p in error.errors) or str(error.detail))
    return HttpResponseRedirect(reverse("pool:node", args=[gpu.node.uid]))


@login_required
@require_GET
def operations(request: HttpRequest) -> HttpResponse:
    """What is broken, whom it touches, what waits."""
    policy = pool_reader(request)
    context = pages.operations()
    context["queue"] = pages.queue_listed(policy, 10)
    context["capacities"] = pages.capacities()
    context["status"] = _supervisor_status()
    context["may_act"] = policy.administers_pool
    context["notes"] = _stat_notes(context)
    return render(request, "pool/operations.html", context)


def _stat_notes(found: dict[str, Any]) -> dict[str, str]:
    """What stands below the figures of the operations page: what they are made of."""
    nodes, cycle, incidents = found["nodes"], found["cycle"], found["incidents_all"]
    critical = sum(one.severity == Incident.Severity.CRITICAL for one in incidents)
    urgent = [_("%(n)s critical") % {"n": critical}] if critical else []
    oldest = [_("oldest %s") % formats.duration(now() - incidents[-1].opened_at)] if incidents else []
    work = _("%(running)s open, %(waiting)s wait") % {
        "running": cycle["running"],
        "waiting": cycle["waiting"],
    }
    last = (
        [_("last %(time)s: %(n)s placed") % {"time": formats.moment(cycle["last_at"]), "n": cycle["placed"]}]
        if cycle["last_at"]
        else []
    )
    return {
        "nodes": formats.comma().join(f"{count} {str(label).lower()}" for label, count in nodes["states"]),
        "incidents": formats.comma().join([*urgent, *oldest]),
        "agents": formats.comma().join(
            _("%(n)s on %(version)s") % {"n": count, "version": version}
            for version, count in nodes["versions"]
        ),
        "cycle": formats.comma().join([*last, work]),
    }


def _supervisor_status() -> list[dict[str, Any]]:
    """Processes as the supervisor of `manage.py up` tells (its status file); empty where none runs."""
    import json
    from pathlib import Path

    from django.conf import settings

    try:
        data = json.loads(Path(settings.GPUPOOL_STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    children = data.get("children") if isinstance(data, dict) else None
    if isinstance(children, dict):
        return [{"name": name, **facts} for name, facts in children.items() if isinstance(facts, dict)]
    return [c for c in children or [] if isinstance(c, dict)]


@login_required
@require_http_methods(["GET", "POST"])
def import_fleet(request: HttpRequest) -> HttpResponse:
    """Upload, dry run, apply. The file is kept in the session between the two steps, never on disk."""
    from pool.services.fleet_import import FleetPlan, fleet_import, fleet_plan

    policy: Policy = request.policy  # type: ignore[attr-defined]
    policy.require(policy.administers_pool)
    plan: FleetPlan | None = None
    error = ""
    if request.method == "POST":
        upload = request.FILES.get("file")
        kept = request.session.get("fleet_file")
        content: bytes | None = None
        name = ""
        if upload is not None:
            if (upload.size or 0) > 4 * 1024 * 1024:
                error = _("The file is larger than 4 MiB.")
            else:
                content, name = upload.read(), upload.name or "fleet.csv"
        elif kept and request.POST.get("apply"):
            content, name = bytes.fromhex(kept["hex"]), kept["name"]
        else:
            error = _("Choose a file first.")
        if content is not None:
            site = request.POST.get("site", "").strip() or (kept or {}).get("site", "")
            try:
                plan = fleet_plan(content=content, filename=name, default_site=site)
                if request.POST.get("apply") and not plan.problems:
                    done = fleet_import(acting_user=actor_of(request), plan=plan)
                    request.session.pop("fleet_file", None)
                    messages.success(
                        request,
                        _("%(new)d nodes are new, %(known)d were brought up to date; %(gpus)d GPUs came in.")
                        % {"new": done["nodes_new"], "known": done["nodes_known"], "gpus": done["gpus_new"]},
                    )
                    return HttpResponseRedirect(reverse("pool:nodes"))
                request.session["fleet_file"] = {"hex": content.hex(), "name": name, "site": site}
            except DomainError as problem:
                error = str(problem.detail)
    status = 200 if not error else 400
    return render(request, "pool/import_fleet.html", {"plan": plan, "error": error}, status=status)


@login_required
@require_http_methods(["GET", "POST"])
def enrol(request: HttpRequest) -> HttpResponse:
    """Make a one-time code, show the two commands, and watch who came in."""
    from pool.services.enrolment import enrolment_code_create

    policy: Policy = request.policy  # type: ignore[attr-defined]
    policy.require(policy.administers_pool)
    code = ""
    error = ""
    clusters = list(Cluster.objects.filter(executor=Cluster.Executor.AGENT).select_related("site"))
    if request.method == "POST":
        try:
            cluster = Cluster.objects.filter(code=request.POST.get("cluster", "")).first()
            code = enrolment_code_create(
                acting_user=actor_of(request),
                cluster=cluster,
                node_name=request.POST.get("node_name", "").strip(),
            )
        except DomainError as problem:
            error = " ".join(str(p["detail"]) for p in problem.errors) or str(problem.detail)
    recent = (
        Node.objects.filter(health_since__isnull=False)
        .select_related("cluster__site")
        .order_by("-created_at")[:8]
    )
    from django.conf import settings

    context = {
        "clusters": clusters,
        "code": code,
        "error": error,
        "recent": recent,
        "base_url": settings.GPUPOOL_BASE_URL,
    }
    return render(request, "pool/enrol.html", context, status=400 if error else 200)
