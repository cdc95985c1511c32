"""Live parts that pages of other rooms fetch: a node's cards, an allocation's four lines, a card's processes."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from monitoring.engine.tiles import STATES
from monitoring.models import NodeState
from monitoring.selectors import access, gpu_page, series, wall
from monitoring.selectors.board import board_now
from monitoring.selectors.topology import topology_of
from monitoring.web.sockets import socket_path
from monitoring.web.views_wall import with_words
from pool.models import Node
from portal.kernel.clock import now


@login_required
@require_GET
def gpu_live(request: HttpRequest, uid: UUID) -> HttpResponse:
    """The four live lines of one card."""
    access.gpu_for(request.policy, uid)  # type: ignore[attr-defined]
    return render(
        request, "monitoring/_lines.html", {"socket": socket_path(request, f"gpus/{uid}"), "cells": 1}
    )


@login_required
@require_GET
def gpu_processes(request: HttpRequest, uid: UUID) -> HttpResponse:
    """The processes on a card, for those who may see its lease."""
    policy = request.policy  # type: ignore[attr-defined]
    card = access.gpu_for(policy, uid)
    held = gpu_page.holdings(policy, card)
    state = gpu_page.states_of(card).get(0)
    shown = gpu_page.processes_of(policy, held, state)
    return render(request, "monitoring/_processes.html", {"processes": shown, "state": state, "gpu": card})


@login_required
@require_GET
def node_live(request: HttpRequest, uid: UUID) -> HttpResponse:
    """A node's cards as a live table, and its host's load."""
    policy = request.policy  # type: ignore[attr-defined]
    node = access.node_for(policy, uid)
    board = board_now()
    keys = access.topic_keys(policy, "node", uid)
    cells = [board.index[key] for key in keys if key in board.index]
    return render(
        request,
        "monitoring/_node_live.html",
        {
            "node": node,
            "rows": with_words(wall.rows(board, cells, policy)),
            "states": STATES,
            "host": _host(node),
            "topology": topology_of(node),
            "socket": socket_path(request, f"nodes/{uid}"),
        },
    )


def _host(node: Node) -> dict[str, float | int | None] | None:
    """The host's load in percent and MiB; None where nothing was reported."""
    state = NodeState.objects.filter(node=node).first()
    if state is None:
        return None
    return {
        "cpu_percent": None if state.cpu_pm is None else state.cpu_pm / 10,
        "iowait_percent": None if state.iowait_pm is None else state.iowait_pm / 10,
        "mem_used_mib": state.mem_used_mib,
    }


@login_required
@require_GET
def allocation_live(request: HttpRequest, uid: UUID) -> HttpResponse:
    """The four live lines of an allocation's cards, for those who may see the allocation.

    While it starts or stops the page asks again with the state that it shows (`seen`) and is loaded anew once that
    is no longer so.
    """
    allocation = access.allocation_for(request.policy, uid)  # type: ignore[attr-defined]
    seen = request.GET.get("seen")
    if seen is not None:
        moved = {} if seen == allocation.state else {"HX-Refresh": "true"}
        return HttpResponse(status=204, headers=moved)
    return render(
        request,
        "monitoring/_allocation_live.html",
        {
            "allocation": allocation,
            "cells": len(access.lease_keys(allocation)),
            "socket": socket_path(request, f"allocations/{uid}"),
        },
    )


MINI_POINT_S = 120
LATE_S = 60


@login_required
@require_GET
def allocation_mini(request: HttpRequest, uid: UUID) -> HttpResponse:
    """How busy an allocation's cards are, now and over the last hour, and how full their memory is: the gauges of a
    card on the home page, and the moment of the data for its live mark."""
    policy = request.policy  # type: ignore[attr-defined]
    board = board_now()
    keys = access.topic_keys(policy, "allocation", uid)
    shown = wall.rows(board, [board.index[key] for key in keys if key in board.index], policy)
    busy = [row["measures"]["busy"]["value"] for row in shown if row["measures"]["busy"]["value"] is not None]
    memory = [
        (row["measures"]["mem"]["value"], row["measures"]["mem_total"]["value"])
        for row in shown
        if row["measures"]["mem"]["value"] is not None and row["measures"]["mem_total"]["value"]
    ]
    total = sum(of for _used, of in memory)
    used = sum(each for each, _of in memory)
    moments = [row["at"] for row in shown if row["at"] is not None]
    return render(
        request,
        "monitoring/_allocation_mini.html",
        {
            "cells": len(keys),
            "told": len(busy),
            "busy": sum(busy) / len(busy) if busy else None,
            "hour": _hour(keys) if busy else [],
            "used_mib": used,
            "total_mib": total,
            "memory_percent": 100 * used / total if total else None,
            "at": max(moments, default=None),
            "late": not moments or (now() - max(moments)).total_seconds() > LATE_S,
        },
    )


def _hour(keys: list[access.Key]) -> list[float | None]:
    """Busy time over the last hour, in percent, each two minutes the mean of the cards; None where nothing came."""
    end = now()
    end -= timedelta(seconds=end.timestamp() % MINI_POINT_S)
    start = end - timedelta(hours=1)
    points = series.history(keys, start=start, end=end, step=60, point_s=MINI_POINT_S)
    by_place = {int((p.at - start).total_seconds()) // MINI_POINT_S: p.util for p in points}
    return [by_place.get(place) for place in range(3600 // MINI_POINT_S)]
