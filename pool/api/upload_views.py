"""API of project folders sent with a request."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from typing import Any

from django.db.models import QuerySet
from django.utils.translation import gettext as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import mixins
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.response import Response

from pool.api import serializers as s
from pool.models import WorkUpload
from pool.services.uploads import MOST_BYTES, too_large, upload_keep
from portal.accounts.api.base import ApiViewSet
from portal.kernel.errors import Invalid

PIECE = 256 * 1024
IN_MEMORY = 1024 * 1024


class Body(tempfile.SpooledTemporaryFile[bytes]):
    """A body on disk; its text is its digest, by which a repeated write is known."""

    digest = ""

    def __str__(self) -> str:
        return self.digest


class PackedFolder(BaseParser):
    """The body as a file: read once, never past the limit, on disk where it is not small."""

    media_type = "application/gzip"

    def parse(  # type: ignore[override]  # what the view reads is a file, no fields
        self, stream: Any, media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Body:
        """The body's bytes in a temporary file."""
        kept = Body(max_size=IN_MEMORY)
        seen, size = hashlib.sha256(), 0
        while data := stream.read(PIECE):
            size += len(data)
            if size > MOST_BYTES:
                kept.close()
                raise too_large()
            seen.update(data)
            kept.write(data)
        kept.digest = seen.hexdigest()
        return kept


class WorkUploadViewSet(mixins.RetrieveModelMixin, ApiViewSet):
    """Own project folders, addressed by the client token of the request that they belong to."""

    serializer_class = s.WorkUploadSerializer
    token_scope = "request"
    lookup_field = "client_token"
    lookup_value_regex = "[A-Za-z0-9._-]{8,64}"
    queryset = WorkUpload.objects.none()
    parser_classes = [PackedFolder]

    def get_queryset(self) -> QuerySet[WorkUpload]:
        """One's own."""
        return WorkUpload.objects.filter(owner=self.request.user)

    @extend_schema(request={"application/gzip": OpenApiTypes.BINARY}, responses={200: s.WorkUploadSerializer})
    def update(self, request: Request, client_token: str) -> Response:
        """Send a folder (tar.gz: plain files and folders, at most 64 MiB packed) before its request is submitted with
        the same client token. It is unpacked into the work folder before the command runs."""
        body = request.data
        if not hasattr(body, "read"):
            raise Invalid(code="invalid", detail=_("Send a packed folder as application/gzip."))
        with body:
            kept = upload_keep(acting_user=self.actor, client_token=client_token, source=body)
        return Response(self.get_serializer(kept).data)
