"""``/api/docs/``: the API described for people, from files that the installation serves itself."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe


@require_safe
def api_docs(request: HttpRequest) -> HttpResponse:
    """The page; the schema is fetched by its script."""
    return render(request, "portal/api_docs.html")
