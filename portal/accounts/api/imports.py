"""Import of people and departments by API: the same judgement as the page, dry run by default."""

from __future__ import annotations

from typing import Any

from django.http import Http404
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from portal.accounts.api.base import ApiViewSet
from portal.accounts.models import User
from portal.accounts.services.importing import (
    DEPARTMENT_ALIASES,
    PEOPLE_ALIASES,
    departments_import,
    people_import,
)
from portal.kernel.tabular import read_table

KINDS: dict[str, tuple[Any, dict[str, str]]] = {
    "people": (people_import, PEOPLE_ALIASES),
    "departments": (departments_import, DEPARTMENT_ALIASES),
}


class ImportFile(serializers.Serializer):
    """A CSV or XLSX table; nothing is written while `dry_run` is true."""

    file = serializers.FileField()
    dry_run = serializers.BooleanField(default=True)


class ImportedRow(serializers.Serializer):
    """What one row does."""

    row = serializers.IntegerField(source="number")
    label = serializers.CharField()
    act = serializers.ChoiceField(choices=["create", "change", "keep"])
    fields_changed = serializers.CharField(source="what")


class FirstPassword(serializers.Serializer):
    """A temporary password of a new person."""

    username = serializers.CharField()
    password = serializers.CharField()


class Imported(serializers.Serializer):
    """What an import did, or would do; `first_passwords` are shown once."""

    dry_run = serializers.BooleanField()
    created = serializers.IntegerField()
    changed = serializers.IntegerField()
    kept = serializers.IntegerField()
    rows = ImportedRow(many=True)
    first_passwords = FirstPassword(many=True, allow_null=True)


class ImportViewSet(ApiViewSet):
    """`people` or `departments`; errors by row and column (`errors[].pointer` is `row/column`)."""

    queryset = User.objects.none()
    serializer_class = Imported
    parser_classes = [MultiPartParser]
    secret_fields = frozenset({"first_passwords"})

    @extend_schema(request={"multipart/form-data": ImportFile}, responses=Imported)
    def create(self, request: Request, kind: str) -> Response:
        """Judge the file as a whole; all or nothing."""
        if kind not in KINDS:
            raise Http404
        self.policy.require(self.policy.administers_people)
        run, aliases = KINDS[kind]
        asked = ImportFile(data=request.data)
        asked.is_valid(raise_exception=True)
        upload = asked.validated_data["file"]
        table = read_table(upload, upload.name, aliases=aliases)
        done = run(acting_user=self.actor, table=table, dry_run=asked.validated_data["dry_run"])
        body = {
            "dry_run": done.dry_run,
            "created": done.created,
            "changed": done.changed,
            "kept": done.kept,
            "rows": ImportedRow(done.rows, many=True).data,
            "first_passwords": [{"username": name, "password": value} for name, value in done.passwords],
        }
        return Response(body, headers={"Cache-Control": "no-store"})
