"""Pages of data sets: list, make or change, take off the list, import."""

from __future__ import annotations

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

from pool.models import Dataset, Site
from pool.selectors.datasets import datasets_visible
from pool.services.datasets import dataset_retire, dataset_save, datasets_import
from portal.accounts.middleware import policy_of_request
from portal.kernel.errors import DomainError, Invalid
from portal.ops.actor import actor_of

PER_PAGE = 50
FIELDS = ("code", "name", "size_gib", "site", "location", "nodes", "department")


def _dataset(request: HttpRequest, uid: Any) -> Dataset:
    found = datasets_visible(policy_of_request(request)).filter(uid=uid).first()
    if found is None:
        raise Http404
    return found


@login_required
@require_GET
def dataset_list(request: HttpRequest) -> HttpResponse:
    """What requests may name, where it lies; ``?retired=1`` also what is off the list."""
    found = datasets_visible(policy_of_request(request))
    if request.GET.get("retired") != "1":
        found = found.filter(retired_at=None)
    q = request.GET.get("q", "").strip()[:100]
    if q:
        found = found.filter(Q(code__icontains=q) | Q(name__icontains=q) | Q(site__code__iexact=q))
    context = {
        "page_obj": Paginator(found, PER_PAGE).get_page(request.GET.get("page")),
        "q": q,
        "retired": request.GET.get("retired") == "1",
        "may_change": policy_of_request(request).administers_pool,
    }
    return render(request, "pool/datasets.html", context)


@login_required
@require_http_methods(["GET", "POST"])
def dataset_edit(request: HttpRequest, uid: Any = None) -> HttpResponse:
    """Make a data set, or change one; what was typed stays where something is wrong."""
    policy = policy_of_request(request)
    policy.require(policy.administers_pool)
    dataset = _dataset(request, uid) if uid is not None else None
    values = _values(dataset)
    problems: dict[str, str] = {}
    status = 200
    if request.method == "POST":
        values = {name: request.POST.get(name, "").strip() for name in FIELDS}
        version = request.POST.get("version", "")
        try:
            made = dataset_save(
                acting_user=actor_of(request),
                values=values,
                dataset=dataset,
                version=int(version) if version.isdecimal() else None,
            )
            messages.success(request, _("%(code)s saved.") % {"code": made.code})
            return HttpResponseRedirect(reverse("pool:datasets"))
        except DomainError as error:
            if error.status == 403:
                raise
            status = error.status
            problems = {p["pointer"]: str(p["detail"]) for p in error.errors} or {"": str(error.detail)}
    context = {
        "dataset": dataset,
        "rows": [
            {
                "name": name,
                "label": label,
                "help": text,
                "value": values.get(name, ""),
                "error": problems.get(name),
            }
            for name, label, text in _labels()
            if not (name == "code" and dataset is not None)
        ],
        "sites": Site.objects.order_by("name"),
        "site": values.get("site", ""),
        "site_error": problems.get("site"),
        "general": problems.get(""),
    }
    return render(request, "pool/dataset_form.html", context, status=status)


def _labels() -> list[tuple[str, str, str]]:
    return [
        ("code", _("Code"), _("what requests name; it stays")),
        ("name", _("Name"), ""),
        ("size_gib", _("Size"), _("GiB")),
        ("location", _("Location"), _("path or address, for people")),
        (
            "nodes",
            _("Cached on nodes"),
            _("names with blanks between; all nodes of its site reach it anyhow"),
        ),
        ("department", _("Department"), _("code; empty: anybody may use it")),
    ]


def _values(dataset: Dataset | None) -> dict[str, str]:
    if dataset is None:
        return {}
    return {
        "name": dataset.name,
        "size_gib": str(dataset.size_gib),
        "site": dataset.site.code if dataset.site is not None else "",
        "location": dataset.location,
        "nodes": " ".join(dataset.cached_on.order_by("name").values_list("name", flat=True)),
        "department": dataset.department.code if dataset.department is not None else "",
    }


@login_required
@require_POST
def dataset_act(request: HttpRequest, uid: Any) -> HttpResponse:
    """Take it off the list."""
    dataset = _dataset(request, uid)
    try:
        dataset_retire(
            acting_user=actor_of(request),
            dataset=dataset,
            reason=request.POST.get("reason", "").strip()[:500],
        )
        messages.success(request, _("%(code)s is off the list.") % {"code": dataset.code})
    except DomainError as error:
        if error.status == 403:
            raise
        messages.error(request, str(error.detail))
    return HttpResponseRedirect(reverse("pool:datasets"))


@login_required
@require_http_methods(["GET", "POST"])
def dataset_import_page(request: HttpRequest) -> HttpResponse:
    """Data sets from CSV or XLSX: a dry run first, errors by row and column, all or nothing."""
    policy = policy_of_request(request)
    policy.require(policy.administers_pool)
    context: dict[str, Any] = {}
    status = 200
    if request.method == "POST":
        file = request.FILES.get("file")
        save = "save" in request.POST
        try:
            if file is None:
                raise Invalid.field("file", _("Choose a CSV or XLSX file."))
            rows = datasets_import(
                acting_user=actor_of(request), data=file.read(), name=file.name or "", dry_run=not save
            )
            if save:
                messages.success(request, _("%(n)s data sets imported.") % {"n": len(rows)})
                return HttpResponseRedirect(reverse("pool:datasets"))
            context["rows"] = rows
        except DomainError as error:
            context["error"], status = error, error.status
    return render(request, "pool/dataset_import.html", context, status=status)
