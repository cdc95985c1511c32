"""``/people/import/`` and ``/departments/import/``: upload, dry run with errors by row and column, then the real run.

The file of a dry run is kept in the person's session folder of the cache for half an hour under a random name,
so that what is run is what was shown.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable
from typing import Any

from django.contrib.auth.decorators import login_required
from django.core.cache import cache
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods

from portal.accounts.policy import Policy
from portal.accounts.services.importing import (
    DEPARTMENT_ALIASES,
    DEPARTMENT_COLUMNS,
    PEOPLE_ALIASES,
    PEOPLE_COLUMNS,
    ImportResult,
    departments_import,
    people_import,
)
from portal.accounts.web.common import policy_required
from portal.accounts.web.forms import UploadForm
from portal.kernel.errors import DomainError, Invalid
from portal.kernel.tabular import column_of, read_table, row_of
from portal.ops.actor import actor_of

KEEP_S = 1800
KINDS: dict[
    str, tuple[Callable[..., ImportResult], dict[str, str], tuple[tuple[str, ...], tuple[str, ...]]]
] = {
    "people": (people_import, PEOPLE_ALIASES, PEOPLE_COLUMNS),
    "departments": (departments_import, DEPARTMENT_ALIASES, DEPARTMENT_COLUMNS),
}


def _key(request: HttpRequest, kind: str, name: str) -> str:
    return f"import:{request.user.pk}:{kind}:{name}"


@sensitive_variables("result")
@login_required
@require_http_methods(["GET", "HEAD", "POST"])
@policy_required
def import_table(request: HttpRequest, policy: Policy, kind: str) -> HttpResponse:
    """Upload (a dry run), then confirm by the kept file's name."""
    if kind not in KINDS:
        raise Http404
    policy.require(policy.administers_people)
    run, aliases, columns = KINDS[kind]
    context: dict[str, Any] = {"kind": kind, "columns": columns, "form": UploadForm()}
    if request.method != "POST":
        return render(request, "accounts/import.html", context)
    name = request.POST.get("kept", "")
    dry_run = not name
    try:
        if dry_run:
            form = UploadForm(request.POST, request.FILES)
            context["form"] = form
            if not form.is_valid():
                return render(request, "accounts/import.html", context, status=400)
            data = form.cleaned_data["file"].read()
            context["file_name"] = form.cleaned_data["file"].name
        else:
            kept = cache.get(_key(request, kind, name))
            if kept is None:
                raise Invalid.field("file", _("The dry run is too long ago. Upload the file again."))
            data, context["file_name"] = base64.b64decode(kept["data"]), kept["name"]
        table = read_table(data, context["file_name"], aliases=aliases)
        result = run(acting_user=actor_of(request), table=table, dry_run=dry_run)
    except DomainError as error:
        context["problems"] = [(row_of(e), column_of(e), e["detail"]) for e in error.errors]
        context["detail"] = error.detail
        context["more"] = error.extra.get("more_errors", 0)
        return render(request, "accounts/import.html", context, status=400)
    if dry_run:
        context["kept"] = secrets.token_urlsafe(16)
        kept = {"data": base64.b64encode(data).decode(), "name": context["file_name"]}
        cache.set(_key(request, kind, context["kept"]), kept, KEEP_S)
    else:
        cache.delete(_key(request, kind, name))
    context["result"] = result
    response = render(request, "accounts/import.html", context)
    response["Cache-Control"] = "no-store"
    return response
