"""The page of one card, histories as figures and CSV, the metrics of an allocation, Prometheus."""

from __future__ import annotations

import hmac
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET

from monitoring.selectors import access, series, wall
from monitoring.selectors import gpu_page as about
from monitoring.selectors.board import board_now
from monitoring.selectors.details import details_of
from monitoring.selectors.metrics import metrics_text
from monitoring.web import figures
from monitoring.web.detail_words import detail_rows
from monitoring.web.sockets import socket_path
from monitoring.web.views_wall import with_words
from monitoring.web.words import ACTIONS, EVENTS
from monitoring.web.xid_words import meaning_words
from portal.accounts.api.auth import TokenAuthentication
from portal.kernel.clock import now


def _span(request: HttpRequest) -> series.Span:
    return series.SPANS.get(request.GET.get("span", ""), series.SPANS["24h"])


@login_required
@require_GET
def gpu_page(request: HttpRequest, uid: UUID) -> HttpResponse:
    """Live lines, history, processes, who had it, identity, what happened."""
    policy = request.policy  # type: ignore[attr-defined]
    card = access.gpu_for(policy, uid)
    board = board_now()
    cells = wall.cells_of(board, uid)
    row, *slices = with_words(wall.rows(board, cells, policy)) if cells else [None]
    held = about.holdings(policy, card)
    states = about.states_of(card)
    span = _span(request)
    spans = {"1h": _("1 h"), "24h": _("24 h"), "7d": _("7 d"), "30d": _("30 d"), "1y": _("1 y")}
    state = states.get(0)
    context = {
        "gpu": card,
        "row": row,
        "slices": slices,
        "held": held,
        "current": [h for h in held if h.lease.ended_at is None],
        "processes": about.processes_of(policy, held, state),
        "state": state,
        "details": detail_rows(details_of(state, at=now())) if state is not None else [],
        "may_cordon": policy.administers_pool,
        "span": span.code,
        "spans": [
            {"url": f"?span={code}", "label": label, "current": code == span.code}
            for code, label in spans.items()
        ],
        "history_url": reverse("monitoring:gpu-history", args=[uid]) + f"?span={span.code}",
        "csv_url": reverse("monitoring:gpu-history-csv", args=[uid]) + f"?span={span.code}",
        "socket": socket_path(request, f"gpus/{uid}"),
        "hours": about.hours(card, timezone.get_current_timezone()),
        "events": [_event(e) for e in about.events_of(card)],
        "api_call": f"GET /api/v1/gpus/{uid}/samples/?from=…",
        "incidents": about.incidents_of(card),
        "compare_url": f"{reverse('monitoring:gpu-compare')}?node={card.node.uid}&span={span.code}",
    }
    return render(request, "monitoring/gpu.html", context)


def _event(event: Any) -> dict[str, Any]:
    """A line of the timeline."""
    tones = {
        "xid": ("bad", "fault"),
        "gpu_lost": ("bad", "fault"),
        "gpu_back": ("ok", "check"),
        "foreign_process": ("warn", "warn"),
    }
    tone, icon = tones.get(event.kind, ("mute", "info"))
    meaning = meaning_words(event.facts.get("meaning"))
    text = str(EVENTS.get(event.kind, event.kind)).replace("{code}", str(event.code or ""))
    effect = event.facts.get("effect", "")
    if event.kind == "xid" and effect in ("ignore", "log_only", "restart_app", "watch"):
        tone, icon = "warn" if effect != "ignore" else "mute", "warn"
    note = " · ".join(str(part) for part in (meaning, ACTIONS.get(effect, "")) if part)
    return {"time": event.at, "text": text, "note": note, "tone": tone, "icon": icon}


def _figure(keys: list[access.Key], span: series.Span) -> dict[str, Any]:
    end = now()
    points = series.span_points(keys, span)
    return figures.history_figure(points, start=figures.iso(end - span.length), end=figures.iso(end))


@login_required
@require_GET
def gpu_history(request: HttpRequest, uid: UUID) -> JsonResponse:
    """The history of a card as a figure."""
    card = access.gpu_for(request.policy, uid)  # type: ignore[attr-defined]
    return JsonResponse(_figure([(card.pk, 0)], _span(request)))


@login_required
@require_GET
def gpu_history_csv(request: HttpRequest, uid: UUID) -> HttpResponse:
    """The same figures as CSV."""
    card = access.gpu_for(request.policy, uid)  # type: ignore[attr-defined]
    span = _span(request)
    return _csv(series.span_points([(card.pk, 0)], span), f"gpu-{card.node.name}-{card.index}-{span.code}")


def _csv(points: list[series.Point], name: str) -> HttpResponse:
    response = HttpResponse(figures.history_csv(points), content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{name}.csv"'
    return response


def _allocation_points(policy: Any, uid: UUID) -> tuple[Any, list[series.Point], Any, Any]:
    """An allocation's whole time, in points that keep a chart under a thousand."""
    allocation = access.allocation_for(policy, uid)
    start = allocation.started_at or allocation.reserved_at
    end = min(now(), allocation.ended_at or now())
    length = max(end - start, timedelta(minutes=1))
    step, point = next((s, p) for limit, s, p in _STEPS if length <= limit)
    start -= timedelta(seconds=start.timestamp() % point)
    points = series.chart(access.lease_keys(allocation), start=start, end=end, step=step, point_s=point)
    return allocation, points, start, end


_STEPS = (
    (timedelta(hours=12), 60, 60),
    (timedelta(days=3), 60, 300),
    (timedelta(days=35), 3600, 3600),
    (timedelta.max, 86400, 86400),
)


@login_required
@require_GET
def allocation_metrics(request: HttpRequest, uid: UUID) -> HttpResponse:
    """All measures of an allocation over its whole time."""
    allocation = access.allocation_for(request.policy, uid)  # type: ignore[attr-defined]
    return render(
        request,
        "monitoring/allocation_metrics.html",
        {
            "allocation": allocation,
            "socket": socket_path(request, f"allocations/{uid}"),
            "cells": len(access.lease_keys(allocation)),
        },
    )


@login_required
@require_GET
def allocation_history(request: HttpRequest, uid: UUID) -> JsonResponse:
    """The history of an allocation as a figure: means over its cards."""
    _a, points, start, end = _allocation_points(request.policy, uid)  # type: ignore[attr-defined]
    return JsonResponse(figures.history_figure(points, start=figures.iso(start), end=figures.iso(end)))


@login_required
@require_GET
def allocation_history_csv(request: HttpRequest, uid: UUID) -> HttpResponse:
    """The same figures as CSV."""
    allocation, points, *_rest = _allocation_points(request.policy, uid)  # type: ignore[attr-defined]
    return _csv(points, f"allocation-{allocation.pk}")


@require_GET
def prometheus(request: HttpRequest) -> HttpResponse:
    """`/metrics`: for a scraper on this machine, or with a token that may read (`Authorization: Bearer gpp_…`)."""
    loopback = (
        request.META.get("REMOTE_ADDR") in ("127.0.0.1", "::1") and "HTTP_X_FORWARDED_FOR" not in request.META
    )
    fixed = settings.GPUPOOL_METRICS_TOKEN
    sent = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    allowed = loopback or bool(fixed and hmac.compare_digest(fixed.encode(), sent.encode()))
    if not allowed and sent:
        allowed = _token_reads(request)
    if not allowed:
        return HttpResponse(status=401, headers={"WWW-Authenticate": 'Bearer realm="gpupool"'})
    return HttpResponse(metrics_text(), content_type="text/plain; version=0.0.4; charset=utf-8")


def _token_reads(request: HttpRequest) -> bool:
    from rest_framework.exceptions import AuthenticationFailed

    try:
        found = TokenAuthentication().authenticate(request)  # type: ignore[arg-type]
    except AuthenticationFailed:
        return False
    return found is not None and bool(found[1].scopes)
