"""Pages of clusters: what carries them, whether it answers; check, discovery with its dry run, limits, foreign work."""

from __future__ import annotations

import json
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Count, Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from pool.executors.base import ADOPTS, Limit, executor_for
from pool.models import Cluster, Gpu, Node, Site
from pool.services.adoption import adoption_first, work_adopt
from pool.services.clusters import cluster_check, cluster_discover, cluster_import, cluster_save, outside
from pool.services.credentials import credential_names, credential_set
from pool.services.outside_limits import limits_diff, limits_push
from pool.web.cluster_words import finding_word
from portal.accounts.middleware import policy_of_request
from portal.accounts.models import Department, User
from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of

PER_PAGE = 50
MOST_ROWS = 50
MOST_PEOPLE = 500
FIELDS = ("code", "name", "site", "executor", "settings")
CREDENTIALS = {"slurm": ("jwt",), "kubernetes": ("kubeconfig", "token")}


def _rows() -> Any:
    return (
        Cluster.objects.select_related("site")
        .annotate(
            node_count=Count("nodes", filter=~Q(nodes__schedulable=Node.Schedulable.RETIRED), distinct=True),
            gpu_count=Count(
                "nodes__gpus", filter=~Q(nodes__gpus__condition=Gpu.Condition.RETIRED), distinct=True
            ),
        )
        .order_by("name", "id")
    )


def _administrator(request: HttpRequest) -> None:
    policy = policy_of_request(request)
    policy.require(policy.administers_pool)


@login_required
@require_GET
def cluster_list(request: HttpRequest) -> HttpResponse:
    """All clusters, with what carries them and whether it answers."""
    _administrator(request)
    page = Paginator(_rows(), PER_PAGE).get_page(request.GET.get("page"))
    return render(request, "pool/clusters.html", {"page_obj": page})


def _cluster(uid: Any) -> Cluster:
    found: Cluster | None = _rows().filter(uid=uid).first()
    if found is None:
        raise Http404
    return found


def _detail(request: HttpRequest, cluster: Cluster, status: int = 200, **more: Any) -> HttpResponse:
    known = credential_names(cluster=cluster)
    names = CREDENTIALS.get(str(cluster.executor), ())
    context = {
        "cluster": cluster,
        "polled": cluster.executor != Cluster.Executor.AGENT,
        "settings": json.dumps(cluster.settings, ensure_ascii=False, indent=2, sort_keys=True),
        "credentials": [{"name": name, "row": known.get(name)} for name in names],
        "foreign": cluster.foreign_work[:MOST_ROWS],
        "foreign_more": max(0, len(cluster.foreign_work) - MOST_ROWS),
        "adopts": ADOPTS in executor_for(cluster).can,
        "away_word": finding_word(cluster.away_code),
        **more,
    }
    return render(request, "pool/cluster_detail.html", context, status=status)


@login_required
@require_GET
def cluster_detail(request: HttpRequest, uid: Any) -> HttpResponse:
    """One cluster."""
    _administrator(request)
    return _detail(request, _cluster(uid))


@login_required
@require_http_methods(["GET", "POST"])
def cluster_edit(request: HttpRequest, uid: Any = None) -> HttpResponse:
    """Make a cluster, or change one; what was typed stays where something is wrong."""
    _administrator(request)
    cluster = _cluster(uid) if uid is not None else None
    values = _values(cluster)
    problems: dict[str, str] = {}
    status = 200
    if request.method == "POST":
        values = {name: request.POST.get(name, values.get(name, "")).strip() for name in FIELDS}
        try:
            made = _save(request, cluster, values)
            messages.success(request, _("%(code)s saved.") % {"code": made.code})
            return HttpResponseRedirect(reverse("pool:cluster", args=[made.uid]))
        except DomainError as error:
            if error.status == 403:
                raise
            status = error.status
            for problem in error.errors:
                before = problems.get(problem["pointer"])
                text = str(problem["detail"])
                problems[problem["pointer"]] = f"{before} {text}" if before else text
            problems = problems or {"": str(error.detail)}
    context = {
        "cluster": cluster,
        "values": values,
        "problems": problems,
        "general": problems.get(""),
        "sites": Site.objects.order_by("name"),
        "kinds": Cluster.Executor.choices,
    }
    return render(request, "pool/cluster_form.html", context, status=status)


def _save(request: HttpRequest, cluster: Cluster | None, values: dict[str, str]) -> Cluster:
    settings: Any
    try:
        settings = json.loads(values["settings"] or "{}")
    except ValueError:
        settings = "unreadable"
    version = request.POST.get("version", "")
    return cluster_save(
        acting_user=actor_of(request),
        values={**values, "settings": settings},
        cluster=cluster,
        version=int(version) if version.isdecimal() else None,
    )


def _values(cluster: Cluster | None) -> dict[str, str]:
    if cluster is None:
        return {"executor": Cluster.Executor.SLURM.value, "settings": "{}"}
    return {
        "code": cluster.code,
        "name": cluster.name,
        "site": cluster.site.code,
        "executor": str(cluster.executor),
        "settings": json.dumps(cluster.settings, ensure_ascii=False, indent=2, sort_keys=True),
    }


@login_required
@require_POST
def cluster_act(request: HttpRequest, uid: Any, act: str) -> HttpResponse:
    """Check, discover (dry run), import, show or push limits, keep a credential: each answers with the page."""
    _administrator(request)
    cluster = _cluster(uid)
    acts = {
        "check": _check,
        "discover": _discover,
        "import": _import,
        "limits": _limits,
        "push": _push,
        "credential": _credential,
    }
    if act not in acts:
        raise Http404
    try:
        return acts[act](request, cluster)
    except DomainError as error:
        if error.status == 403:
            raise
        return _detail(
            request, cluster, error.status, problem=finding_word(error.code), problem_detail=error.detail
        )


@login_required
@require_http_methods(["GET", "POST"])
def cluster_adopt(request: HttpRequest, uid: Any) -> HttpResponse:
    """Take work that runs there in as somebody's allocation; what was typed stays where it is refused."""
    _administrator(request)
    cluster = _cluster(uid)
    name = request.POST.get("work") or request.GET.get("work") or ""
    work = next((item for item in cluster.foreign_work if item["id"] == name), None)
    if work is None:
        raise Http404
    values = adoption_first(cluster=cluster, work=work)
    problems: dict[str, str] = {}
    status = 200
    if request.method == "POST":
        values = {key: request.POST.get(key, "").strip() for key in values}
        try:
            allocation = work_adopt(
                acting_user=actor_of(request),
                cluster=cluster,
                external_id=name,
                person=values["person"],
                values=_wishes(values),
            )
            messages.success(request, _("%(work)s is %(ref)s now.") % {"work": name, "ref": allocation.ref})
            return HttpResponseRedirect(reverse("pool:allocation", args=[allocation.uid]))
        except DomainError as error:
            if error.status == 403:
                raise
            status = error.status
            fields = {"duration_s": "hours"}
            for problem in error.errors:
                pointer = fields.get(problem["pointer"], problem["pointer"])
                problems.setdefault(pointer if pointer in values else "", str(problem["detail"]))
            problems = problems or {"": f"{error.detail} ({finding_word(error.code)})"}
    context = {
        "cluster": cluster,
        "work": work,
        "values": values,
        "problems": problems,
        "general": problems.get(""),
        "departments": Department.objects.without_tree_fields().filter(closed_at=None).order_by("code"),
        "people": User.objects.filter(is_active=True).order_by("username")[:MOST_PEOPLE],
    }
    return render(request, "pool/cluster_adopt.html", context, status=status)


def _wishes(values: dict[str, str]) -> dict[str, Any]:
    """Hours as the request's seconds; what is no whole number stays as it was typed and is told beside its field."""
    hours = values["hours"]
    return {
        "department": values["department"],
        "purpose": values["purpose"],
        "interruptible": values["interruptible"] == "yes",
        "duration_s": int(hours) * 3600 if hours.isdecimal() and len(hours) < 6 else hours or "?",
    }


def _check(request: HttpRequest, cluster: Cluster) -> HttpResponse:
    result = cluster_check(acting_user=actor_of(request), cluster=cluster)
    rows = [{"word": finding_word(code), "ok": ok, "detail": text} for code, ok, text in result.findings]
    return _detail(request, cluster, findings=rows[:MOST_ROWS], all_well=result.ok)


def _discover(request: HttpRequest, cluster: Cluster) -> HttpResponse:
    plan, _found = cluster_discover(acting_user=actor_of(request), cluster=cluster)
    return _detail(request, cluster, plan=plan, new=plan.new[:MOST_ROWS], new_more=len(plan.new) - MOST_ROWS)


def _import(request: HttpRequest, cluster: Cluster) -> HttpResponse:
    plan = cluster_import(acting_user=actor_of(request), cluster=cluster)
    count = len(plan.new)
    messages.success(request, ngettext("%(n)d node taken in.", "%(n)d nodes taken in.", count) % {"n": count})
    return HttpResponseRedirect(reverse("pool:cluster", args=[cluster.uid]))


def _limits(request: HttpRequest, cluster: Cluster) -> HttpResponse:
    with outside():
        changes = limits_diff(cluster=cluster)
    return _detail(request, cluster, limits=changes, limits_json=_packed(changes))


def _packed(changes: list[Limit]) -> str:
    return json.dumps([[item.scope, item.resource, item.there, item.wanted] for item in changes])


def _push(request: HttpRequest, cluster: Cluster) -> HttpResponse:
    try:
        seen = [Limit(*row) for row in json.loads(request.POST.get("seen", "[]"))]
    except (ValueError, TypeError):
        seen = []
    with outside():
        done = limits_push(acting_user=actor_of(request), cluster=cluster, seen=seen)
    messages.success(request, ngettext("%(n)d limit set.", "%(n)d limits set.", len(done)) % {"n": len(done)})
    return HttpResponseRedirect(reverse("pool:cluster", args=[cluster.uid]))


def _credential(request: HttpRequest, cluster: Cluster) -> HttpResponse:
    name = request.POST.get("name", "")
    if name not in CREDENTIALS.get(str(cluster.executor), ()):
        raise Http404
    value = request.POST.get("value", "").strip()
    credential_set(acting_user=actor_of(request), cluster=cluster, name=name, value=value)
    messages.success(request, _("Kept.") if value else _("Removed."))
    return HttpResponseRedirect(reverse("pool:cluster", args=[cluster.uid]))
