"""API of quotas: use and limits per department and flavour, setting numbers, quota changes."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins
from rest_framework.decorators import action
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from portal.accounts.api.base import ApiViewSet
from portal.accounts.api.imports import ImportFile
from portal.accounts.api.params import choice_param, department_param
from portal.accounts.models import Department
from portal.accounts.policy import Policy
from portal.kernel.api import check_if_match, etag
from portal.kernel.errors import Invalid
from quotas.api import serializers as s
from quotas.models import GpuFlavour, QuotaChange, QuotaUsage
from quotas.selectors.grants import GrantNumbers
from quotas.selectors.tree_rows import TreeRow, flavours_with_quota, quota_scope, tree_of, tree_rows
from quotas.services.grant_import import quotas_import
from quotas.services.grants import grant_set
from quotas.services.quota_changes import lending_submit, quota_change_submit, quota_change_withdraw


def row_json(row: TreeRow, flavour: GpuFlavour, noninterruptible: int) -> dict[str, Any]:
    """One department and flavour."""
    return {
        "department": row.department.code,
        "department_name": row.department.name,
        "flavour": flavour.code,
        "guaranteed_milli": row.bar.guaranteed,
        "borrow_limit_milli": row.numbers.borrow_limit,
        "lend_limit_milli": row.numbers.lend_limit,
        "hard_cap_milli": row.numbers.hard_cap,
        "weight": row.numbers.weight,
        "granted": row.granted,
        "used_milli": row.bar.used,
        "noninterruptible_milli": noninterruptible,
        "borrowed_milli": row.bar.borrowed,
        "lent_milli": row.bar.lent,
        "over_milli": row.bar.over,
        "limit_milli": row.bar.limit,
        "available_milli": row.bar.available,
    }


def numbers_of(data: dict[str, Any]) -> GrantNumbers:
    """The five numbers of validated input."""
    return GrantNumbers(
        data.get("guaranteed_milli") or 0,
        data.get("borrow_limit_milli"),
        data.get("lend_limit_milli"),
        data.get("hard_cap_milli"),
        data.get("weight", 1),
    )


def numbers_json(numbers: GrantNumbers) -> dict[str, Any]:
    """The five numbers as input names them."""
    return {k if k == "weight" else f"{k}_milli": v for k, v in numbers.as_fields().items()}


def _keep_what_is_left_out(
    data: dict[str, Any], sent: Any, department: Department, flavour: GpuFlavour
) -> None:
    """A number that was not sent stays as it is in force; only a sent null means unlimited."""
    row = QuotaUsage.objects.filter(department=department, flavour=flavour, granted=True).first()
    if row is None:
        return
    for name in ("borrow_limit", "lend_limit", "hard_cap"):
        if f"{name}_milli" not in sent:
            data[f"{name}_milli"] = getattr(row, name)
    if "weight" not in sent:
        data["weight"] = row.weight


def department_of(policy: Policy, key: str, pointer: str = "department") -> Department:
    """A department by uid or code; 400 beside its field when there is none."""
    found = next((d for d in policy.tree.rows.values() if key in (str(d.uid), d.code)), None)
    if found is None:
        raise Invalid.field(pointer, _("There is no such department."))
    return found


def flavour_of(key: str) -> GpuFlavour:
    """A flavour by uid or code, on offer or not."""
    found = next((f for f in GpuFlavour.objects.order_by("pk") if key in (str(f.uid), f.code)), None)
    if found is None:
        raise Invalid.field("flavour", _("There is no such flavour."))
    return found


class QuotaViewSet(ApiViewSet):
    """Quotas and their use, now."""

    queryset = QuotaChange.objects.none()
    serializer_class = s.QuotaRowSerializer
    token_scope = "admin"

    @extend_schema(
        parameters=[
            OpenApiParameter("flavour", str, description="code; default: all"),
            OpenApiParameter("department", str, description="uid or code; with all below it"),
        ]
    )
    def list(self, request: Request) -> Response:
        """Limits and use per department and flavour, depth first."""
        scope = quota_scope(self.policy)
        flavours = flavours_with_quota()
        if code := request.query_params.get("flavour", ""):
            flavours = [flavour_of(code)]
        department = department_param(request, self.policy.tree)
        below = None if department is None else set(self.policy.tree.subtree(department.pk))
        out: list[dict[str, Any]] = []
        for flavour in flavours:
            tree = tree_of(flavour, self.policy.tree)
            for row in tree_rows(flavour, tree, self.policy.tree, scope):
                if below is None or row.department.pk in below:
                    counters = tree.counters[row.department.pk]
                    out.append(row_json(row, flavour, counters.total_noninterruptible))
        page = self.paginate_queryset(out)  # type: ignore[arg-type]
        return self.get_paginated_response(page)

    @extend_schema(request=s.QuotaInput, responses={201: dict})
    def create(self, request: Request) -> Response:
        """Put numbers in force. 409 quota_sum where sums do not add up, unless ``override``."""
        sent = s.QuotaInput(data=request.data)
        sent.is_valid(raise_exception=True)
        data = dict(sent.validated_data)
        department, flavour = department_of(self.policy, data["department"]), flavour_of(data["flavour"])
        _keep_what_is_left_out(data, request.data, department, flavour)
        done = grant_set(
            acting_user=self.actor,
            policy=self.policy,
            department=department,
            flavour=flavour,
            **numbers_of(data).as_fields(),
            starts_at=data.get("starts_at"),
            ends_at=data.get("ends_at"),
            reason=data["reason"],
            override=data["override"],
        )
        grant = done.grant
        return Response(
            {
                "uid": str(grant.uid),
                "department": department.code,
                "flavour": flavour.code,
                **numbers_json(GrantNumbers.of(grant)),
                "starts_at": grant.during.lower,
                "ends_at": grant.during.upper,
                "warnings": done.warnings,
            },
            status=201,
        )

    @extend_schema(
        operation_id="quotas_import", request={"multipart/form-data": ImportFile}, responses={200: dict}
    )
    @action(detail=False, methods=["post"], url_path="import", parser_classes=[MultiPartParser])
    def take_file(self, request: Request) -> Response:
        """Put the numbers of a file in force, all rows or none; with `dry_run` only say what it would do. Problems
        come by row and column.
        """
        sent = ImportFile(data=request.data)
        sent.is_valid(raise_exception=True)
        file = sent.validated_data["file"]
        done = quotas_import(
            acting_user=self.actor,
            policy=self.policy,
            data=file.read(),
            name=file.name,
            dry_run=sent.validated_data["dry_run"],
        )
        results = [
            {
                "department": row.department.code,
                "flavour": row.flavour.code,
                "before": None if row.before is None else numbers_json(row.before),
                "after": numbers_json(row.after),
                "changes": row.changes,
            }
            for row in done.rows
        ]
        return Response({"dry_run": done.dry_run, "count": len(results), "results": results})


class QuotaChangeViewSet(mixins.RetrieveModelMixin, ApiViewSet):
    """Quota changes that departments ask for."""

    queryset = QuotaChange.objects.none()
    serializer_class = s.QuotaChangeSerializer
    token_scope = "request"

    def get_queryset(self) -> QuerySet[QuotaChange]:
        """Own ones, and those of departments that the person reads."""
        scope = self.policy.reads
        rows = QuotaChange.objects.filter(scope.q() | scope.q("lender_id")) | QuotaChange.objects.filter(
            requester=self.request.user
        )
        rows = rows.select_related("department", "flavour", "requester", "lender").order_by("-id").distinct()
        state = choice_param(self.request, "state", QuotaChange.State.values)
        return rows.filter(state=state) if state else rows

    @extend_schema(parameters=[OpenApiParameter("state", str, enum=QuotaChange.State.values)])
    def list(self, request: Request) -> Response:
        """Newest first."""
        page = self.paginate_queryset(self.get_queryset())
        return self.get_paginated_response(s.QuotaChangeSerializer(page, many=True).data)

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """One change: asked, in force then, granted."""
        row = self.get_object()
        return Response(s.QuotaChangeSerializer(row).data, headers=etag(row.version))

    @extend_schema(request=s.QuotaChangeInput, responses={201: s.QuotaChangeSerializer})
    def create(self, request: Request) -> Response:
        """Ask for other numbers, or (with ``lender``) to be lent quota for a period. 409 quota_sum where sums
        would not add up, unless ``override`` asks all the same.
        """
        sent = s.QuotaChangeInput(data=request.data)
        sent.is_valid(raise_exception=True)
        data = dict(sent.validated_data)
        common: dict[str, Any] = {
            "acting_user": self.actor,
            "policy": self.policy,
            "department": department_of(self.policy, data["department"]),
            "flavour": flavour_of(data["flavour"]),
            "purpose": data["purpose"],
            "starts_at": data.get("starts_at"),
        }
        if data.get("lender"):
            if data.get("ends_at") is None:
                raise Invalid.field("ends_at", _("A lending has an end."))
            made = lending_submit(
                **common,
                lender=department_of(self.policy, data["lender"], "lender"),
                amount_milli=data.get("amount_milli") or 0,
                ends_at=data["ends_at"],
            )
        else:
            if data.get("guaranteed_milli") is None:
                raise Invalid.field("guaranteed_milli", _("A number is needed here (0 for none)."))
            _keep_what_is_left_out(data, request.data, common["department"], common["flavour"])
            made = quota_change_submit(
                **common, asked=numbers_of(data), ends_at=data.get("ends_at"), override=data["override"]
            )
        return Response(s.QuotaChangeSerializer(made).data, status=201, headers=etag(made.version))

    @extend_schema(request=None, responses=s.QuotaChangeSerializer)
    @action(detail=True, methods=["post"])
    def withdraw(self, request: Request, uid: str) -> Response:
        """Take it back while it is undecided."""
        row = self.get_object()
        check_if_match(request, row.version)
        done = quota_change_withdraw(acting_user=self.actor, policy=self.policy, change=row)
        return Response(s.QuotaChangeSerializer(done).data, headers=etag(done.version))
