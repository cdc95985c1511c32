"""API of telemetry: the state of all cards, raw samples of the last hour, histories. All read only."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.utils.translation import gettext_lazy as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from monitoring.engine.samples import RowRefused, parse_time
from monitoring.engine.tiles import STATES
from monitoring.models import GpuState
from monitoring.selectors import access, fleet_series, series, wall
from monitoring.selectors.board import board_now
from monitoring.selectors.details import details_of
from pool.models import Cluster
from portal.accounts.api.base import ApiViewSet
from portal.kernel.api import Pages
from portal.kernel.clock import now
from portal.kernel.errors import Invalid
from portal.kernel.units import from_ms
from quotas.models import GpuFlavour

_TIME = [
    OpenApiParameter("from", OpenApiTypes.DATETIME, description="RFC 3339 with zone, inclusive"),
    OpenApiParameter("to", OpenApiTypes.DATETIME, description="exclusive; default now"),
]
STEPS = {60: timedelta(hours=24), 3600: timedelta(days=62), 86400: timedelta(days=3660)}
MAX_SAMPLES = 4000


class TelemetryView(ApiViewSet):
    """What the views of this file share: they read, so a token with any scope may call them."""

    serializer_class = None
    queryset = None
    pagination_class = None

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        self.policy.require(request.user.is_authenticated)


class StateView(TelemetryView):
    """State and last measures of every card."""

    pagination_class = Pages

    @extend_schema(
        operation_id="telemetry_state",
        responses=OpenApiTypes.OBJECT,
        parameters=[
            *(OpenApiParameter(name, str) for name in ("site", "model", "q")),
            OpenApiParameter("state", str, enum=list(STATES)),
        ],
    )
    def list(self, request: Request) -> Response:
        """Cards by page, in the order of the wall; a missing measure is null and its reason stands in `missing`."""
        board = board_now()
        get = request.query_params
        wanted = wall.WallFilter(
            site=get.get("site", ""),
            model=get.get("model", ""),
            state=get.get("state", ""),
            q=get.get("q", "")[:80],
        )
        page = self.paginate_queryset(wall.chosen(board, wanted))  # type: ignore[arg-type]
        rows = wall.rows(board, page or [], self.policy)
        return self.get_paginated_response([state_json(row) for row in rows])


def state_json(row: dict[str, Any]) -> dict[str, Any]:
    """One card as JSON: percent, MiB, °C, W; `allocation` only where the reader may know it."""
    m = row["measures"]
    allocation = row["allocation"]
    return {
        "gpu": row["gpu_uid"],
        "node": row["node"],
        "node_uid": row["node_uid"],
        "index": row["number"],
        "site": row["site"],
        "model": row["model"],
        "state": row["state"],
        "sampled_at": row["at"].isoformat() if row["at"] else None,
        "stale": row["stale"],
        "busy_percent": m["busy"]["value"],
        "sm_activity_percent": m["sm"]["value"],
        "memory_used_mib": m["mem"]["value"],
        "memory_total_mib": m["mem_total"]["value"],
        "temperature_celsius": m["temp"]["value"],
        "power_watts": m["power"]["value"],
        "missing": {name: one["reason"] for name, one in m.items() if one["reason"]},
        "allocation": str(allocation.uid) if allocation else None,
    }


def _time(request: Request, name: str, default: datetime) -> datetime:
    raw = request.query_params.get(name)
    if raw is None:
        return default
    try:
        return from_ms(parse_time(raw))
    except RowRefused as error:
        raise Invalid.field(
            name, _("A time with its zone is needed, such as 2026-06-16T14:03:12Z.")
        ) from error


class SamplesView(TelemetryView):
    """Raw samples of one card."""

    @extend_schema(
        operation_id="gpu_samples",
        responses=OpenApiTypes.OBJECT,
        parameters=[*_TIME, OpenApiParameter("slot", int, description="0: the card; 1 to 20: a slice")],
    )
    def list(self, request: Request, uid: UUID) -> Response:
        """At most the hour before `to`, at most 4,000 samples; longer spans are read from `history`."""
        card = access.gpu_for(self.policy, uid)
        end = _time(request, "to", now())
        start = _time(request, "from", end - timedelta(minutes=15))
        if not start < end:
            raise Invalid.field("from", _("It has to lie before `to`."))
        if end - start > series.RAW_LIMIT:
            raise Invalid.field("from", _("Raw samples are read an hour at a time; use history for more."))
        slot = request.query_params.get("slot", "0")
        if not slot.isdecimal() or int(slot) > 20:
            raise Invalid.field("slot", _("0 is the card; 1 to 20 are its slices."))
        key = (card.pk, int(slot))
        line = series.recent([key], length=end - start, points=MAX_SAMPLES, until=end)[key]
        columns = zip(line.t, line.busy, line.sm, line.mem, line.temp, line.power, strict=True)
        return Response(
            {
                "gpu": str(card.uid),
                "slot": int(slot),
                "from": start.isoformat(),
                "to": end.isoformat(),
                "samples": [
                    {
                        "at": from_ms(t).isoformat(),
                        "busy_percent": busy,
                        "sm_activity_percent": sm,
                        "memory_used_mib": mem,
                        "temperature_celsius": temp,
                        "power_watts": power,
                    }
                    for t, busy, sm, mem, temp, power in columns
                ],
            }
        )


class DetailsView(TelemetryView):
    """What the driver tells of one card beside the measures of the wall."""

    @extend_schema(operation_id="gpu_details", responses=OpenApiTypes.OBJECT)
    def list(self, request: Request, uid: UUID) -> Response:
        """Last values of clocks, throttling, links, errors and more, by name with unit; one that was due and did not
        come is null with its reason in `missing`, one that its source never tells is not there."""
        card = access.gpu_for(self.policy, uid)
        state = GpuState.objects.filter(gpu=card, slot=0).first()
        found = details_of(state, at=now()) if state is not None else []
        return Response(
            {
                "gpu": str(card.uid),
                "sampled_at": state.at.isoformat() if state is not None else None,
                "source": state.source if state is not None else None,
                "values": {one.name: one.value for one in found},
                "missing": {one.name: one.reason for one in found if one.reason},
            }
        )


class HistoryView(TelemetryView):
    """Rollups of one card."""

    @extend_schema(
        operation_id="gpu_history",
        responses=OpenApiTypes.OBJECT,
        parameters=[*_TIME, OpenApiParameter("step", int, enum=list(STEPS))],
    )
    def list(self, request: Request, uid: UUID) -> Response:
        """Points of 60, 3600 or 86400 s: means over the samples that had the measure, maxima, coverage 0 to 1."""
        card = access.gpu_for(self.policy, uid)
        return Response(history_json(card.uid, [(card.pk, 0)], request))


class FleetHistoryView(TelemetryView):
    """The whole pool, or one cluster or flavour of it, by hour or day."""

    @extend_schema(
        operation_id="telemetry_history",
        responses=OpenApiTypes.OBJECT,
        parameters=[
            *_TIME,
            OpenApiParameter("step", int, enum=list(fleet_series.STEPS)),
            OpenApiParameter("cluster", str, description="cluster code"),
            OpenApiParameter("flavour", str, description="flavour code"),
        ],
    )
    def list(self, request: Request) -> Response:
        """Means over the cards that had samples in each hour or day, how many those were, and coverage 0 to 1."""
        step = int(request.query_params.get("step") or 3600)
        end = _time(request, "to", now())
        start = _time(request, "from", end - timedelta(days=7))
        if not start < end:
            raise Invalid.field("from", _("It has to lie before `to`."))
        if end - start > STEPS[step]:
            raise Invalid.field("from", _("The span is too long for this step."))
        chosen = {
            "clusters": _ids(Cluster, request.query_params.get("cluster")),
            "flavours": _ids(GpuFlavour, request.query_params.get("flavour")),
        }
        points = fleet_series.fleet_history(start=start, end=end, step=step, **chosen)
        return Response(
            {
                "step": step,
                "from": start.astimezone(UTC).isoformat(),
                "to": end.astimezone(UTC).isoformat(),
                "points": [
                    {
                        "at": p.at.astimezone(UTC).isoformat(),
                        "cards": p.cards,
                        "coverage": round(p.coverage, 4),
                        "busy_percent": p.util,
                        "sm_activity_percent": p.sm,
                        "memory_used_mib": p.mem_mib,
                        "temperature_celsius": p.temp,
                        "power_watts": p.power_w,
                    }
                    for p in points
                ],
            }
        )


def _ids(model: Any, code: str | None) -> Sequence[int] | None:
    """The id behind a code as a filter; None without one. A code that nobody has finds nothing."""
    return None if not code else list(model.objects.filter(code=code).values_list("pk", flat=True))


class AllocationHistoryView(TelemetryView):
    """Rollups of an allocation's cards."""

    @extend_schema(
        operation_id="allocation_history",
        responses=OpenApiTypes.OBJECT,
        parameters=[*_TIME, OpenApiParameter("step", int, enum=list(STEPS))],
    )
    def list(self, request: Request, uid: UUID) -> Response:
        """Means over the allocation's cards; only for those who may see the allocation."""
        allocation = access.allocation_for(self.policy, uid)
        return Response(history_json(allocation.uid, access.lease_keys(allocation), request))


def history_json(uid: UUID, keys: list[access.Key], request: Request) -> dict[str, Any]:
    """The answer of both history views."""
    raw = request.query_params.get("step") or "3600"
    step = int(raw) if raw.isdecimal() else 0
    if step not in STEPS:
        raise Invalid.field("step", _("One of 60, 3600 and 86400 seconds."))
    end = _time(request, "to", now())
    start = _time(request, "from", end - min(STEPS[step], timedelta(days=7)))
    if not start < end:
        raise Invalid.field("from", _("It has to lie before `to`."))
    if end - start > STEPS[step]:
        raise Invalid.field("from", _("The span is too long for this step."))
    points = series.history(keys, start=start, end=end, step=step, point_s=step)
    return {
        "of": str(uid),
        "step": step,
        "from": start.astimezone(UTC).isoformat(),
        "to": end.astimezone(UTC).isoformat(),
        "points": [
            {
                "at": p.at.astimezone(UTC).isoformat(),
                "samples": p.samples,
                "coverage": round(p.coverage, 4),
                "busy_percent": p.util,
                "busy_percent_max": p.util_max,
                "sm_activity_percent": p.sm,
                "memory_used_mib": p.mem_mib,
                "memory_used_mib_max": p.mem_max_mib,
                "temperature_celsius": p.temp,
                "temperature_celsius_max": p.temp_max,
                "power_watts": p.power_w,
                "power_watts_max": p.power_max_w,
            }
            for p in points
        ],
    }
