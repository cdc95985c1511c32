"""API of taking back and maintenance: the same services as the pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import mixins
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from pool.api import reclaim_serializers as s
from pool.models import MaintenanceWindow, Node, ReclaimAdvice, ReclaimCase, Site
from pool.selectors.reclaim import Modes
from pool.services.maintenance import window_cancel, window_plan
from pool.services.modes import mode_set
from pool.services.nodes import require_pool_admin
from pool.services.reclaim_rules import rules_active, rules_publish
from pool.services.surplus import surplus_reclaim
from portal.accounts.api.base import ApiViewSet
from portal.accounts.api.params import query, uuid_param
from portal.accounts.models import Department
from portal.kernel.api import check_if_match, etag
from portal.kernel.errors import Invalid
from quotas.models import GpuFlavour


@extend_schema_view(
    list=extend_schema(
        parameters=[
            query("state", "whether it still goes on", enum=("open", "closed")),
            query("cause", "why it is taken back", enum=ReclaimCase.Cause.values),
            query("allocation", "uid of an allocation", OpenApiTypes.UUID),
        ]
    )
)
class ReclaimCaseViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """What is taken back: of one's own work, and of departments that one reads."""

    serializer_class = s.ReclaimCaseSerializer
    filter_params = {"state", "cause", "allocation"}
    queryset = ReclaimCase.objects.none()

    def get_queryset(self) -> QuerySet[ReclaimCase]:
        mine = Q(allocation__holder=self.request.user) | self.policy.reads.q("allocation__department_id")
        found = ReclaimCase.objects.filter(mine).select_related(
            "allocation__department", "for_request", "window"
        )
        wanted = self.request.query_params
        if wanted.get("state"):
            found = found.filter(closed_at__isnull=wanted["state"] == "open")
        if wanted.get("cause"):
            found = found.filter(cause=wanted["cause"])
        if allocation := uuid_param(self.request, "allocation"):
            found = found.filter(allocation__uid=allocation)
        return found.order_by("-id")

    @extend_schema(request=s.SurplusInput, responses=s.ReclaimCaseSerializer(many=True))
    @action(detail=False, methods=["post"])
    def surplus(self, request: Request) -> Response:
        """Take back with notice what a department has above its quota."""
        require_pool_admin(self.actor, self.policy)
        body = s.SurplusInput(data=request.data)
        body.is_valid(raise_exception=True)
        made = surplus_reclaim(
            acting_user=self.actor,
            department=_department(body.validated_data["department"]),
            flavour=_flavour(body.validated_data["flavour"]),
            notice_s=body.validated_data["notice_s"],
            reason=body.validated_data["reason"],
        )
        return Response(s.ReclaimCaseSerializer(made, many=True).data)


class ReclaimAdviceViewSet(mixins.ListModelMixin, ApiViewSet):
    """What modes spared. For those who read the department."""

    serializer_class = s.ReclaimAdviceSerializer
    queryset = ReclaimAdvice.objects.none()

    def get_queryset(self) -> QuerySet[ReclaimAdvice]:
        return (
            ReclaimAdvice.objects.filter(self.policy.reads.q("allocation__department_id"))
            .select_related("allocation__department", "for_request")
            .order_by("-last_at", "-id")
        )


class ReclaimModeViewSet(ApiViewSet):
    """How far taking back acts, department by department."""

    serializer_class = s.ModeSerializer
    pagination_class = None

    @extend_schema(responses=s.ModeSerializer(many=True))
    def list(self, request: Request) -> Response:
        """The installation (department null) and all departments, own or inherited."""
        self.policy.require(self.policy.administers_pool or self.policy.audits)
        modes = Modes.load(self.policy.tree)
        rows: list[tuple[int | None, str | None]] = [(None, None)]
        rows += [(row.pk, row.code) for _depth, row in self.policy.tree.ordered()]
        return Response([_mode(modes, pk, code) for pk, code in rows])

    @extend_schema(request=s.ModeInput, responses=s.ModeSerializer)
    def create(self, request: Request) -> Response:
        """Set the mode of one department, or of the installation."""
        require_pool_admin(self.actor, self.policy)
        body = s.ModeInput(data=request.data)
        body.is_valid(raise_exception=True)
        code = body.validated_data["department"]
        department = None if code is None else _department(code)
        mode_set(
            acting_user=self.actor,
            department=department,
            mode=body.validated_data["mode"],
            willing=body.validated_data["willing"],
            minimum_s=_minimum(body.validated_data),
            reason=body.validated_data["reason"],
        )
        return Response(_mode(Modes.load(), department.pk if department else None, code))


def _mode(modes: Modes, department_id: int | None, code: str | None) -> dict[str, Any]:
    row = modes.row_of(department_id)
    minimum = None if department_id is None else modes.minimum.get(department_id)
    return {
        "department": code,
        "mode": str(row.mode) if row is not None else "enforce",
        "willing": row is not None and row.willing,
        "own": department_id in modes.own,
        "min_run_preempt_s": None if minimum is None else minimum.min_run_preempt_s,
        "min_run_reclaim_s": None if minimum is None else minimum.min_run_reclaim_s,
    }


def _minimum(data: Mapping[str, Any]) -> tuple[int | None, int | None] | None:
    names = ("min_run_preempt_s", "min_run_reclaim_s")
    return (data.get(names[0]), data.get(names[1])) if any(name in data for name in names) else None


class ReclaimRulesViewSet(ApiViewSet):
    """The numbers of taking back."""

    serializer_class = s.RulesSerializer
    pagination_class = None

    @extend_schema(responses=s.RulesSerializer)
    def list(self, request: Request) -> Response:
        """Those in force."""
        return Response(_rules())

    @extend_schema(request=s.RulesInput, responses=s.RulesSerializer)
    def create(self, request: Request) -> Response:
        """Publish others."""
        require_pool_admin(self.actor, self.policy)
        body = s.RulesInput(data=request.data)
        body.is_valid(raise_exception=True)
        values = dict(body.validated_data)
        seen, reason = values.pop("rules_version"), values.pop("reason")
        rules_publish(acting_user=self.actor, values=values, reason=reason, seen_version=seen)
        return Response(_rules())


def _rules() -> dict[str, Any]:
    row, rules = rules_active()
    return {"rules_version": row.pk if row is not None else 0, "values": asdict(rules)}


@extend_schema_view(
    list=extend_schema(
        parameters=[query("state", "where it is in its life", enum=MaintenanceWindow.State.values)]
    )
)
class MaintenanceWindowViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Maintenance windows: everybody may know when nodes go away; administrators plan them."""

    serializer_class = s.WindowSerializer
    filter_params = {"state"}
    queryset = MaintenanceWindow.objects.none()

    def get_queryset(self) -> QuerySet[MaintenanceWindow]:
        found = MaintenanceWindow.objects.select_related("site").prefetch_related("nodes")
        if state := self.request.query_params.get("state"):
            found = found.filter(state=state)
        return found.order_by("-starts_at", "-id")

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        window = self.get_object()
        return Response(self.get_serializer(window).data, headers=etag(window.version))

    @extend_schema(request=s.WindowInput, responses={201: s.WindowSerializer})
    def create(self, request: Request) -> Response:
        """Plan a window."""
        require_pool_admin(self.actor, self.policy)
        body = s.WindowInput(data=request.data)
        body.is_valid(raise_exception=True)
        values = dict(body.validated_data)
        site, names = values.pop("site"), values.pop("nodes")
        window = window_plan(acting_user=self.actor, site=_site(site), nodes=_nodes(names), **values)
        return Response(self.get_serializer(window).data, status=201, headers=etag(window.version))

    @extend_schema(request=s.ReasonInput, responses=s.WindowSerializer)
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, uid: str) -> Response:
        """Call it off, or end it early."""
        require_pool_admin(self.actor, self.policy)
        body = s.ReasonInput(data=request.data)
        body.is_valid(raise_exception=True)
        window = self.get_object()
        check_if_match(request, window.version)
        window = window_cancel(acting_user=self.actor, window=window, reason=body.validated_data["reason"])
        return Response(self.get_serializer(window).data, headers=etag(window.version))


def _department(code: str) -> Department:
    found = Department.objects.filter(code=code).first()
    if found is None:
        raise Invalid.field("department", _("There is no such department."))
    return found


def _flavour(code: str) -> GpuFlavour:
    found = GpuFlavour.objects.filter(code=code).first()
    if found is None:
        raise Invalid.field("flavour", _("There is no such flavour."))
    return found


def _site(code: str | None) -> Site | None:
    if not code:
        return None
    found = Site.objects.filter(code=code).first()
    if found is None:
        raise Invalid.field("site", _("There is no such site."))
    return found


def _nodes(names: list[str]) -> list[Node]:
    found = list(Node.objects.filter(name__in=names).order_by("name"))
    missing = sorted(set(names) - {node.name for node in found})
    if missing:
        raise Invalid.field("nodes", _("Not known: {names}.").format(names=", ".join(missing)))
    return found
