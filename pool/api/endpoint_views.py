"""API of where services answer."""

from __future__ import annotations

from django.db.models import QuerySet
from django.utils.translation import gettext as _
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from pool.api import serializers as s
from pool.selectors.endpoints import endpoints, service_of
from portal.accounts.api.base import ApiViewSet
from portal.kernel.errors import NotFound
from quotas.models import CapacityRequest


class ServiceEndpointViewSet(ApiViewSet):
    """Replicas of a service, by the uid of its request: an address that stays while they move between nodes."""

    serializer_class = s.ServiceEndpointsSerializer
    queryset = CapacityRequest.objects.none()

    def get_queryset(self) -> QuerySet[CapacityRequest]:
        """Not listed: a service is asked for by its uid."""
        return CapacityRequest.objects.none()

    @extend_schema(responses=s.ServiceEndpointsSerializer)
    def retrieve(self, request: Request, uid: str) -> Response:
        """Its running replicas, those whose health check succeeds first. Where nobody may see it: 404."""
        found = service_of(self.policy, uid)
        if found is None:
            raise NotFound(code="not_found", detail=_("There is no such thing here."))
        answer = {"request": found.uid, "ref": found.ref, "replicas": endpoints(self.policy, found)}
        return Response(s.ServiceEndpointsSerializer(answer).data)
