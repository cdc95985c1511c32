"""API of pool: nodes, GPUs, allocations, queue. The same services as the pages."""

from __future__ import annotations

from typing import Any

from django.db.models import Q, QuerySet
from django.http import StreamingHttpResponse
from django.shortcuts import get_object_or_404
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from pool.api import serializers as s
from pool.models import Allocation, Gpu, Node, QueueEntry
from pool.selectors import pages
from pool.selectors.logs import log_after, log_pieces, member_asked
from pool.services import allocations, conditions, nodes
from pool.services.enrolment import agent_token_revoke
from pool.services.fleet_import import fleet_import, fleet_plan
from pool.services.idle import still_needed
from pool.services.modes import consent_set
from portal.accounts.api.base import ApiViewSet
from portal.accounts.api.imports import ImportFile
from portal.accounts.api.params import bool_param
from portal.kernel.api import check_if_match, etag
from portal.kernel.streaming import streamed_text
from quotas.models import CapacityRequest

IN_USE = [word for word in Gpu.Condition.values if word != Gpu.Condition.RETIRED]


class FleetFile(ImportFile):
    """A CSV or XLSX table of nodes; nothing is written while `dry_run` is true."""

    site = serializers.CharField(required=False, allow_blank=True, default="", max_length=48)


def _text(name: str, description: str) -> OpenApiParameter:
    return OpenApiParameter(name, OpenApiTypes.STR, description=description)


@extend_schema_view(
    list=extend_schema(
        parameters=[
            _text("site", "site code"),
            _text("cluster", "cluster code"),
            OpenApiParameter("health", str, enum=Node.Health.values),
            OpenApiParameter("schedulable", str, enum=Node.Schedulable.values),
            _text("name", "exact name"),
        ]
    )
)
class NodeViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Nodes. Decisions need a reason and the role of pool administrator."""

    serializer_class = s.NodeSerializer
    token_scope = "admin"
    queryset = Node.objects.none()

    def get_queryset(self) -> QuerySet[Node]:
        found = pages.nodes_listed()
        wanted = self.request.query_params
        columns = {
            "site": "cluster__site__code",
            "cluster": "cluster__code",
            "health": "health",
            "schedulable": "schedulable",
            "name": "name",
        }
        for name, column in columns.items():
            if value := wanted.get(name):
                found = found.filter(**{column: value})
        return found

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        node = self.get_object()
        return Response(self.get_serializer(node).data, headers=etag(node.version))

    def _answer(self, node: Node) -> Response:
        fresh = pages.nodes_listed().filter(pk=node.pk).first() or node
        return Response(self.get_serializer(fresh).data, headers=etag(node.version))

    @extend_schema(request=s.ReasonSerializer, responses=s.NodeSerializer)
    @action(detail=True, methods=["post"])
    def cordon(self, request: Request, uid: str) -> Response:
        """Place nothing new here."""
        return self._decide(request, nodes.node_cordon)

    @extend_schema(request=s.ReasonSerializer, responses=s.NodeSerializer)
    @action(detail=True, methods=["post"])
    def uncordon(self, request: Request, uid: str) -> Response:
        """Open the node again."""
        return self._decide(request, nodes.node_uncordon)

    def _decide(self, request: Request, service: Any) -> Response:
        nodes.require_pool_admin(self.actor, self.policy)
        body = s.ReasonSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        node = self.get_object()
        check_if_match(request, node.version)
        return self._answer(service(acting_user=self.actor, node=node, reason=body.validated_data["reason"]))

    @extend_schema(request=s.DrainSerializer, responses=s.NodeSerializer)
    @action(detail=True, methods=["post"])
    def drain(self, request: Request, uid: str) -> Response:
        """Empty the node with notice."""
        nodes.require_pool_admin(self.actor, self.policy)
        body = s.DrainSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        node = self.get_object()
        check_if_match(request, node.version)
        nodes.node_drain(acting_user=self.actor, node=node, **body.validated_data)
        node.refresh_from_db()
        return self._answer(node)

    @extend_schema(request=s.ReasonSerializer, responses=s.NodeSerializer)
    @action(detail=True, methods=["post"], url_path="revoke-agent")
    def revoke_agent(self, request: Request, uid: str) -> Response:
        """End the node's token at once; its agent is refused until it enrols again."""
        nodes.require_pool_admin(self.actor, self.policy)
        body = s.ReasonSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        node = self.get_object()
        agent_token_revoke(acting_user=self.actor, node=node, reason=body.validated_data["reason"])
        return self._answer(node)

    @extend_schema(
        operation_id="nodes_import", request={"multipart/form-data": FleetFile}, responses={200: dict}
    )
    @action(detail=False, methods=["post"], url_path="import", parser_classes=[MultiPartParser])
    def take_file(self, request: Request) -> Response:
        """Take in the nodes of a file, all rows or none; with `dry_run` only say what it would do. Problems come
        by row and column.
        """
        nodes.require_pool_admin(self.actor, self.policy)
        sent = FleetFile(data=request.data)
        sent.is_valid(raise_exception=True)
        file, dry_run = sent.validated_data["file"], sent.validated_data["dry_run"]
        plan = fleet_plan(content=file.read(), filename=file.name, default_site=sent.validated_data["site"])
        if not dry_run or plan.problems:
            fleet_import(acting_user=self.actor, plan=plan)
        return Response(
            {
                "dry_run": dry_run,
                "nodes_new": plan.new_nodes,
                "nodes_known": plan.known_nodes,
                "gpus": plan.gpus,
                "models": plan.models,
            }
        )

    @extend_schema(request=s.MaintenanceSerializer, responses=s.NodeSerializer)
    @action(detail=True, methods=["post"])
    def maintenance(self, request: Request, uid: str) -> Response:
        """Take an empty node out of service."""
        nodes.require_pool_admin(self.actor, self.policy)
        body = s.MaintenanceSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        node = self.get_object()
        check_if_match(request, node.version)
        return self._answer(nodes.node_maintenance(acting_user=self.actor, node=node, **body.validated_data))


@extend_schema_view(
    list=extend_schema(
        parameters=[
            _text("site", "site code"),
            _text("node", "node name"),
            _text("flavour", "flavour code"),
            OpenApiParameter("condition", str, enum=IN_USE),
            _text("uuid", "the card's UUID"),
        ]
    )
)
class GpuViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """GPUs. Identity is the UUID, never the index."""

    serializer_class = s.GpuSerializer
    queryset = Gpu.objects.none()

    def get_queryset(self) -> QuerySet[Gpu]:
        found = Gpu.objects.exclude(condition=Gpu.Condition.RETIRED).select_related(
            "node__cluster__site", "flavour"
        )
        columns = {
            "site": "node__cluster__site__code",
            "node": "node__name",
            "flavour": "flavour__code",
            "condition": "condition",
            "uuid": "uuid",
        }
        for name, column in columns.items():
            if value := self.request.query_params.get(name):
                found = found.filter(**{column: value})
        return found.order_by("node__name", "index", "id")

    @extend_schema(request=s.ReasonSerializer, responses=s.GpuSerializer)
    @action(detail=True, methods=["post"])
    def cordon(self, request: Request, uid: str) -> Response:
        """Take one card out of placement."""
        return self._set(request, True)

    @extend_schema(request=s.ReasonSerializer, responses=s.GpuSerializer)
    @action(detail=True, methods=["post"])
    def uncordon(self, request: Request, uid: str) -> Response:
        """Put one card back."""
        return self._set(request, False)

    def _set(self, request: Request, cordoned: bool) -> Response:
        nodes.require_pool_admin(self.actor, self.policy)
        body = s.ReasonSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        gpu = self.get_object()
        check_if_match(request, gpu.version)
        conditions.gpu_cordon(
            acting_user=self.actor, gpu=gpu, cordoned=cordoned, reason=body.validated_data["reason"]
        )
        return Response(self.get_serializer(gpu).data, headers=etag(gpu.version))


@extend_schema_view(
    list=extend_schema(
        parameters=[
            OpenApiParameter("state", str, enum=Allocation.State.values),
            OpenApiParameter("open", bool, description="true: only those that still hold something"),
            _text("holder", "user name"),
            _text("department", "department code"),
            OpenApiParameter("request", OpenApiTypes.UUID, description="uid of the request"),
        ]
    )
)
class AllocationViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Allocations that the person may see: own ones and those of departments they read."""

    serializer_class = s.AllocationSerializer
    token_scope = "request"
    queryset = Allocation.objects.none()

    def get_serializer_class(self) -> Any:
        return s.AllocationDetailSerializer if self.action == "retrieve" else s.AllocationSerializer

    def get_queryset(self) -> QuerySet[Allocation]:
        found = pages.allocations_visible(self.policy).prefetch_related(
            "members__node", "leases__gpu__node", "leases__mig_slice"
        )
        columns = {
            "state": "state",
            "holder": "holder__username",
            "department": "department__code",
            "request": "request__uid",
        }
        for name, column in columns.items():
            if value := self.request.query_params.get(name):
                found = found.filter(**{column: value})
        still_open = bool_param(self.request, "open")
        if still_open is not None:
            over = Q(state=Allocation.State.ENDED)
            found = found.filter(~over if still_open else over)
        return found.order_by("-id")

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        found = self.get_object()
        return Response(self.get_serializer(found).data, headers=etag(found.version))

    def _answer(self, allocation: Allocation) -> Response:
        allocation.refresh_from_db()
        return Response(s.AllocationSerializer(allocation).data, headers=etag(allocation.version))

    @extend_schema(request=s.ReleaseSerializer, responses=s.AllocationSerializer)
    @action(detail=True, methods=["post"])
    def release(self, request: Request, uid: str) -> Response:
        """Give back early."""
        return self._end(request, allocations.allocation_release)

    @extend_schema(request=s.ReleaseSerializer, responses=s.AllocationSerializer)
    @action(detail=True, methods=["post"])
    def revoke(self, request: Request, uid: str) -> Response:
        """Take back, as a pool administrator, with a reason."""
        return self._end(request, allocations.allocation_revoke)

    def _end(self, request: Request, service: Any) -> Response:
        body = s.ReleaseSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        found = self.get_object()
        check_if_match(request, found.version)
        service(acting_user=self.actor, allocation=found, reason=body.validated_data["reason"])
        return self._answer(found)

    @extend_schema(request=s.ExtendSerializer, responses=s.AllocationSerializer)
    @action(detail=True, methods=["post"])
    def extend(self, request: Request, uid: str) -> Response:
        """Ask for more time."""
        body = s.ExtendSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        found = self.get_object()
        check_if_match(request, found.version)
        allocations.allocation_extend(
            acting_user=self.actor, allocation=found, extra_s=body.validated_data["extra_s"]
        )
        return self._answer(found)

    @extend_schema(request=None, responses=s.AllocationSerializer)
    @action(detail=True, methods=["post"], url_path="still-needed")
    def still_needed(self, request: Request, uid: str) -> Response:
        """Say that idle work is still needed: its holder, a few times."""
        found = self.get_object()
        still_needed(acting_user=self.actor, allocation=found)
        return self._answer(found)

    @extend_schema(request=s.ConsentSerializer, responses=s.AllocationSerializer)
    @action(detail=True, methods=["post"])
    def consent(self, request: Request, uid: str) -> Response:
        """Agree, or no longer, that it may be taken back while its department is in roll-out."""
        body = s.ConsentSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        found = self.get_object()
        consent_set(acting_user=self.actor, request=found.request, willing=body.validated_data["willing"])
        return self._answer(found)

    def _with_output(self) -> Allocation:
        """The allocation, where the person may read what it wrote; Refused for one that they may only see."""
        found: Allocation = self.get_object()
        self.policy.require(
            self.policy.reads_output(holder_id=found.holder_id, department_id=found.department_id)
        )
        return found

    @extend_schema(
        parameters=[OpenApiParameter("member", OpenApiTypes.INT, description="rank in the gang, from 0")],
        responses={(200, "text/plain"): OpenApiTypes.STR},
    )
    @action(detail=True, methods=["get"])
    def log(self, request: Request, uid: str) -> StreamingHttpResponse:
        """The kept output of one member."""
        found = self._with_output()
        member = member_asked(request.query_params.get("member", ""))
        return streamed_text(request._request, log_pieces(allocation_id=found.pk, member=member))

    @extend_schema(
        parameters=[
            OpenApiParameter("member", OpenApiTypes.INT, description="rank in the gang, from 0"),
            OpenApiParameter("after", OpenApiTypes.INT, description="offset of the last piece that is known"),
        ],
        responses=s.LogPiecesSerializer,
    )
    @action(detail=True, methods=["get"], url_path="log-pieces")
    def log_pieces(self, request: Request, uid: str) -> Response:
        """Output after a piece, with how the allocation stands: ask again while it runs, to follow it."""
        found = self._with_output()
        after = int(request.query_params.get("after") or -1)
        member = member_asked(request.query_params.get("member", ""))
        # The state first: what ended has all its output already when it is told.
        state = {"state": found.state, "exit_code": found.exit_code, "end_reason": found.end_reason}
        return Response(state | {"pieces": log_after(allocation_id=found.pk, member=member, after=after)})


class QueueViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Why requests wait, as of the last plan. Addressed by the request's uid."""

    serializer_class = s.QueueEntrySerializer
    lookup_field = "request__uid"
    lookup_url_kwarg = "uid"
    queryset = QueueEntry.objects.none()

    def get_queryset(self) -> QuerySet[QueueEntry]:
        return (
            QueueEntry.objects.filter(request__state=CapacityRequest.State.QUEUED)
            .filter(self.policy.reads.q("request__department_id") | Q(request__requester=self.request.user))
            .select_related("request__flavour")
            .order_by("position", "request_id")
        )

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        entry = get_object_or_404(self.get_queryset(), request__uid=kwargs["uid"])
        return Response(self.get_serializer(entry).data)
