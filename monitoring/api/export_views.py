"""API of large files: ask for one, see how far it is, download it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import FileResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.reverse import reverse

from monitoring.models import ExportJob
from monitoring.services.exports import KINDS, export_ask, export_for, export_open, exports_of
from portal.accounts.api.base import ApiViewSet
from quotas.models import LedgerEntry


class ExportQuestion(serializers.Serializer[Any]):
    """What file, of which ledger lines. A file of FOCUS is of one month."""

    file = serializers.ChoiceField(choices=sorted(KINDS))
    month = serializers.CharField(required=False, help_text="month of the books, e.g. 2026-05")
    department = serializers.CharField(required=False, help_text="uid or code; its subtree")
    flavour = serializers.CharField(required=False, help_text="code")
    user = serializers.CharField(required=False, help_text="uid")
    site = serializers.CharField(required=False, help_text="code")
    kind = serializers.ChoiceField(required=False, choices=LedgerEntry.Kind.values)
    day = serializers.DateField(required=False, help_text="local day of use")
    q = serializers.CharField(
        required=False, max_length=80, help_text="R-17, an entry number, person, cost code, node or card"
    )


class ExportRow(serializers.ModelSerializer[ExportJob]):
    """A file: `done` of `total` rows so far; `url` once it is ready, until `expires_at`."""

    file = serializers.CharField(source="kind")
    params = serializers.SerializerMethodField()
    url = serializers.SerializerMethodField()

    class Meta:
        model = ExportJob
        fields = [
            "uid", "file", "params", "language", "state", "done", "total", "file_name", "size", "error_code",
            "created_at", "ready_at", "expires_at", "url",
        ]  # fmt: skip

    def get_params(self, job: ExportJob) -> dict[str, str]:
        """The filter that was asked for."""
        return {name: value for name, value in job.params.items() if name != "seen"}

    def get_url(self, job: ExportJob) -> str | None:
        """Where it is downloaded."""
        if job.state != ExportJob.State.READY:
            return None
        return reverse("v1:export-download", args=[job.uid], request=self.context.get("request"))


@extend_schema(tags=["reports"])
class ExportViewSet(ApiViewSet):
    """Files of ledger lines of any number, made by a worker and kept seven days. Only for whoever asked, as long as
    they still see all that is in them."""

    queryset = ExportJob.objects.none()
    serializer_class = ExportRow
    token_scope = "read"  # a file changes nothing: it is a long way to read

    @extend_schema(operation_id="exports_list", responses={200: ExportRow(many=True)})
    def list(self, request: Request) -> Response:
        """The caller's own, newest first."""
        page = self.paginate_queryset(exports_of(self.policy))
        return self.get_paginated_response(self.get_serializer(page, many=True).data)

    @extend_schema(operation_id="exports_ask", request=ExportQuestion, responses={201: ExportRow})
    def create(self, request: Request) -> Response:
        """Ask for a file; a worker makes it, and tells the caller when it is ready."""
        given = ExportQuestion(data=request.data)
        given.is_valid(raise_exception=True)
        data = {name: str(value) for name, value in given.validated_data.items()}
        job = export_ask(acting_user=self.actor, kind=data.pop("file"), params=data)
        return Response(self.get_serializer(job).data, status=status.HTTP_201_CREATED)

    @extend_schema(operation_id="exports_look", responses={200: ExportRow})
    def retrieve(self, request: Request, uid: str) -> Response:
        """How far it is."""
        return Response(self.get_serializer(export_for(self.policy, UUID(str(uid)))).data)

    @extend_schema(
        operation_id="exports_download",
        responses={
            (200, "text/csv"): OpenApiTypes.BINARY,
            (
                200,
                "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
            ): OpenApiTypes.BINARY,
        },
    )
    def download(self, request: Request, uid: str) -> FileResponse:
        """The file's bytes. 409 while it is being made, 404 once it has expired."""
        job, file = export_open(self.policy, UUID(str(uid)))
        return FileResponse(file, as_attachment=True, filename=job.file_name)

    def perform_content_negotiation(self, request: Request, force: bool = False) -> Any:
        """A download has the type of its file, whatever the caller accepts."""
        return super().perform_content_negotiation(request, force=force or self.action == "download")
