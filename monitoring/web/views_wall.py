"""The wall: its page, the list of cells, the pop card, who holds what, the sums."""

from __future__ import annotations

import gzip
import json
from typing import Any
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext as _
from django.utils.translation import pgettext
from django.views.decorators.http import require_GET

from monitoring.engine.board import Board
from monitoring.selectors import wall
from monitoring.selectors.board import board_now
from monitoring.web.sockets import socket_path
from monitoring.web.words import ICONS, MEASURES, reason
from portal.accounts.policy import Policy
from portal.kernel.units import gpus_from_milli

PER_PAGE = 50
KEY_ORDER = (
    "in_use",
    "idle",
    "free",
    "starting",
    "reserved",
    "reclaiming",
    "draining",
    "cordoned",
    "split",
    "fault",
    "lost",
    "no_lease",
    "suspect",
    "no_data",
    "maintenance",
)
_files: dict[str, tuple[bytes, bytes]] = {}


def _filter(request: HttpRequest, board: Board) -> wall.WallFilter:
    """The filter in the URL; a value that is not on the list filters to nothing, never to all."""
    get = request.GET
    department = _department(request)
    return wall.WallFilter(
        site=get.get("site", ""),
        model=get.get("model", ""),
        state=get.get("state", ""),
        q=get.get("q", "")[:80],
        held=wall.held_cells(board, request.policy, department) if department is not None else None,  # type: ignore[attr-defined]
    )


def _department(request: HttpRequest) -> int | None:
    text = request.GET.get("department", "")
    if not text:
        return None
    return next((pk for pk, row in _departments(request.policy) if str(row.uid) == text), -1)  # type: ignore[attr-defined]


def _departments(policy: Policy) -> list[tuple[int, Any]]:
    """Departments whose holdings the reader may see, in tree order."""
    home = getattr(policy.user, "home_department_id", None)
    return [
        (row.pk, row) for _depth, row in policy.tree.ordered() if row.pk in policy.reads or row.pk == home
    ]


@login_required
@require_GET
def wall_page(request: HttpRequest) -> HttpResponse:
    """The wall, or its table twin with `?view=table`."""
    board = board_now()
    table = request.GET.get("view") == "table"
    measure = request.GET.get("measure", "state")
    measure = measure if measure in MEASURES else "state"
    wanted = _filter(request, board)
    counts = board.counts()
    policy: Policy = request.policy  # type: ignore[attr-defined]
    context: dict[str, Any] = {
        "view": "table" if table else "wall",
        "measure": measure,
        # SM activity is offered only where some source measures it: NVML alone does not.
        "measures": [
            (code, label, ICONS[code])
            for code, label in MEASURES.items()
            if code != "sm" or board.measures_sm or measure == "sm"
        ],
        "sites": [(code, name) for _pk, code, name in board.sites],
        "models": sorted({row.model for row in board.nodes}),
        "departments": [(str(row.uid), policy.tree.path(pk)) for pk, row in _departments(policy)],
        "wanted": wanted,
        "department": request.GET.get("department", ""),
        "state_key": [(code, counts[code]) for code in KEY_ORDER],
        **_sums(board),
    }
    if table:
        sort = request.GET.get("sort", "")
        cells = wall.ordered(board, wall.chosen(board, wanted), sort)
        page = Paginator(cells, PER_PAGE).get_page(request.GET.get("page"))
        context |= {
            "has_sm": board.measures_sm,
            "page": page,
            "rows": with_words(wall.rows(board, page.object_list, policy)),
        }
    else:
        context |= {"words": _words(), "socket": socket_path(request, "wall")}
    return render(request, "monitoring/wall.html", context)


def with_words(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with `why` beside each measure that is missing, in the reader's language."""
    for row in rows:
        for one in row["measures"].values():
            one["why"] = reason(one["reason"]) if one["reason"] else ""
    return rows


def _words() -> dict[str, Any]:
    """Texts that the wall's script needs, in the reader's language."""
    return {
        "short": {
            "reclaiming": _("Reclaim"),
            "maintenance": _("Maint."),
            "no_lease": _("No lease"),
            "suspect": pgettext("tile", "Suspect"),
        },
        "na": _("N/A"),
        "node_of": _("1 node × {per}"),
        "nodes_of": _("{nodes} nodes × {per}"),
        "node": _("1 node, {gpus} GPUs"),
        "nodes": _("{nodes} nodes, {gpus} GPUs"),
        "allocated": _("{held} of {all} held, {free} free"),
        "mean": _("mean busy time of held {mean} %"),
        "mean_na": _("mean busy time of held N/A"),
        "data": _("data from {some} of {all}"),
        "full": _("full"),
        "free": _("{n} free"),
        "faults_one": _("1 fault"),
        "faults": _("{n} faults"),
        "nothing": _("No GPU matches these filters."),
        "failed": _("The list of GPUs could not be loaded. Trying again."),
    }


def _sums(board: Board) -> dict[str, Any]:
    """The parts of what is installed, each as words with its number of GPUs; parts of 0 are left out past the first
    two."""
    s = board.sums()
    parts = [
        (s.allocated, _("%(n)s allocated")),
        (s.free, _("%(n)s free")),
        (s.stranded, _("%(n)s stranded")),
        (s.cordoned, _("%(n)s cordoned")),
        (s.outside, _("%(n)s used without a lease")),
        (s.maintenance, _("%(n)s maintenance")),
        (s.down, _("%(n)s down or without data")),
    ]
    return {
        "sum_total": _gpus(s.installed),
        "sum_parts": [
            text % {"n": _gpus(amount)} for k, (amount, text) in enumerate(parts) if amount or k < 2
        ],
        "sum_data": s.with_data,
        "sum_cards": s.installed // 1000,
    }


def _gpus(milli: int) -> str:
    """Milli-GPU as GPUs with grouped thousands: `6,212`, `0.5`."""
    return f"{gpus_from_milli(milli):,f}"


@login_required
@require_GET
def wall_sum(request: HttpRequest) -> HttpResponse:
    """The sentence of sums, asked again while the page stands."""
    return render(request, "monitoring/_wall_sum.html", _sums(board_now()))


@login_required
@require_GET
def wall_cells(request: HttpRequest) -> HttpResponse:
    """The list of cells as JSON, with an ETag; made and compressed once per version in this process."""
    board = board_now()
    tag = wall.identity_tag(board)
    if request.headers.get("If-None-Match", "").removeprefix("W/") == tag:
        return HttpResponse(status=304, headers={"ETag": tag})
    if tag not in _files:
        plain = json.dumps(wall.identity(board), separators=(",", ":"), ensure_ascii=False).encode()
        _files.clear()
        _files[tag] = (plain, gzip.compress(plain, 6, mtime=0))
    plain, packed = _files[tag]
    zipped = "gzip" in request.headers.get("Accept-Encoding", "")
    response = HttpResponse(packed if zipped else plain, content_type="application/json")
    if zipped:
        response["Content-Encoding"] = "gzip"
    response["ETag"], response["Cache-Control"] = tag, "private, no-cache"
    patch_vary_headers(response, ["Accept-Encoding", "Cookie"])
    return response


@login_required
@require_GET
def wall_held(request: HttpRequest) -> JsonResponse:
    """Cells held by `?department=`, for the filter of the wall."""
    board = board_now()
    department = _department(request)
    if department is None:
        raise Http404
    held = wall.held_cells(board, request.policy, department)  # type: ignore[attr-defined]
    return JsonResponse({"version": board.version, "cells": sorted(held)})


@login_required
@require_GET
def wall_card(request: HttpRequest, uid: UUID) -> HttpResponse:
    """The pop card of one tile (`?slot=` for a slice)."""
    board = board_now()
    slot = request.GET.get("slot", "0")
    i = wall.cell_of(board, uid, int(slot) if slot.isdecimal() and len(slot) < 4 else 0)
    if i is None:
        raise Http404
    (row,) = with_words(wall.rows(board, [i], request.policy))  # type: ignore[attr-defined]
    return render(
        request, "monitoring/_wall_card.html", {"row": row, "url": reverse("monitoring:gpu", args=[uid])}
    )
