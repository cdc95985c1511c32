"""What would happen if it were asked: the pool's part of the panel beside the request form."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST

from pool.selectors.what_if import what_if
from pool.web.what_if_words import deadline_words, near_words, start_words
from portal.kernel.errors import DomainError
from quotas.services.asking import read_request
from quotas.web.views_requests import make_form


@login_required
@require_POST
def what_if_panel(request: HttpRequest) -> HttpResponse:
    """Start, deadline, and what would start sooner, from the typed form; quiet where it is not complete."""
    form = make_form(request, data=request.POST)
    policy = request.policy  # type: ignore[attr-defined]
    values = {**form.values(), "purpose": form.typed("purpose") or "-"}
    context: dict[str, Any] = {}
    try:
        cleaned = read_request(values, user=request.user, policy=policy, draft=True)
    except DomainError:
        return render(request, "pool/_what_if.html", context)
    if cleaned["flavours"] or cleaned["shape"] == "cpu":
        answer = what_if(cleaned, user_id=int(request.user.pk or 0), offered=form.offered)
        context = {
            "start": start_words(answer),
            "deadline": deadline_words(answer, cleaned["deadline_at"]),
            "near": [near_words(one) for one in answer.near],
        }
    return render(request, "pool/_what_if.html", context)
