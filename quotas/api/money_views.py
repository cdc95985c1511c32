"""API of prices, the ledger and months. Amounts are integers: micro currency and GPU-milliseconds."""

from __future__ import annotations

from datetime import date
from typing import Any

from django.conf import settings
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from portal.accounts.api.base import ApiViewSet
from portal.accounts.models import Department, Role
from portal.kernel.clock import now
from portal.kernel.errors import Invalid, NotFound
from quotas.models import GpuFlavour, LedgerEntry, PriceRate
from quotas.selectors.billing_time import billing_zone, month_of
from quotas.selectors.money import Lines, book_months, line_filter, month_from
from quotas.selectors.month_report import GROUPINGS, Total, ledger_mark, month_report
from quotas.selectors.prices import rates
from quotas.selectors.running import one_look
from quotas.services.months import correction_book, month_close
from quotas.services.price_import import prices_import
from quotas.services.prices import rate_set


class PriceSerializer(serializers.ModelSerializer[PriceRate]):
    """A price version. `valid_to` is exclusive; null: until a new one is set."""

    flavour = serializers.CharField(source="flavour.code")
    site = serializers.CharField(source="site_code")
    department = serializers.CharField(source="department.code", default="", help_text="empty: for all")
    valid_from = serializers.DateTimeField(source="during.lower")
    valid_to = serializers.DateTimeField(source="during.upper", allow_null=True)
    set_by = serializers.CharField(source="entered_by_name")
    currency = serializers.SerializerMethodField()

    class Meta:
        model = PriceRate
        fields = [
            "uid", "flavour", "site", "department", "micro_per_gpu_hour", "list_micro_per_gpu_hour",
            "power_micro_per_gpu_hour", "idle_micro_per_gpu_hour", "currency", "valid_from", "valid_to", "book",
            "set_by",
        ]  # fmt: skip

    def get_currency(self, _rate: PriceRate) -> str:
        """ISO 4217 code."""
        return str(settings.GPUPOOL_CURRENCY)


class PriceInput(serializers.Serializer[Any]):
    """What sets a price."""

    flavour = serializers.CharField()
    site = serializers.CharField(required=False, allow_blank=True, default="", max_length=48)
    department = serializers.CharField(
        required=False, allow_blank=True, default="", help_text="code; empty: for all"
    )
    micro_per_gpu_hour = serializers.IntegerField(min_value=0, help_text="without surcharges")
    power_micro_per_gpu_hour = serializers.IntegerField(
        min_value=0, required=False, default=0, help_text="surcharge on every GPU-hour held"
    )
    idle_micro_per_gpu_hour = serializers.IntegerField(
        min_value=0, required=False, default=0, help_text="surcharge on GPU-hours held idle"
    )
    list_micro_per_gpu_hour = serializers.IntegerField(
        min_value=0, required=False, allow_null=True, default=None
    )
    valid_from = serializers.DateTimeField(required=False, help_text="default: now")
    book = serializers.CharField(required=False, allow_blank=True, default="", max_length=48)
    reason = serializers.CharField(max_length=300)


class PriceFile(serializers.Serializer[Any]):
    """A CSV or XLSX table of prices; nothing is written while `dry_run` is true."""

    file = serializers.FileField()
    dry_run = serializers.BooleanField(default=True)
    reason = serializers.CharField(required=False, allow_blank=True, default="", max_length=300)


class LineSerializer(serializers.ModelSerializer[LedgerEntry]):
    """A ledger line; `department` is the path of names at that time."""

    entry = serializers.IntegerField(source="pk")
    request = serializers.SerializerMethodField()
    department = serializers.CharField(source="department_path")
    user = serializers.CharField(source="user_name")
    flavour = serializers.CharField(source="flavour_name")
    site = serializers.CharField(source="site_code")
    node = serializers.CharField(source="node_name")
    gpu = serializers.CharField(source="gpu_label")
    corrects = serializers.IntegerField(source="corrects_id", allow_null=True)
    booked_month = serializers.DateField(format="%Y-%m")

    class Meta:
        model = LedgerEntry
        fields = [
            "entry", "uid", "kind", "booked_month", "local_day", "starts_at", "ends_at", "request", "department",
            "user", "cost_code", "flavour", "site", "node", "gpu", "charge_milli", "gpu_ms", "surcharge_ms",
            "micro_per_gpu_hour", "rate_uid", "amount_micro", "currency", "corrects", "reason", "booked_at",
        ]  # fmt: skip

    def get_request(self, line: LedgerEntry) -> str | None:
        """Reference of the request, e.g. R-17."""
        return f"R-{line.request_id_ref}" if line.request_id_ref else None


class CorrectionInput(serializers.Serializer[Any]):
    """Signed figures that are added to a line."""

    gpu_ms = serializers.IntegerField(default=0)
    amount_micro = serializers.IntegerField(default=0)
    reason = serializers.CharField(max_length=500)


FILTERS = [
    OpenApiParameter("month", str, description="Month of the books, e.g. 2026-05"),
    OpenApiParameter("department", str, description="uid or code; its subtree"),
    OpenApiParameter("flavour", str, description="code"),
    OpenApiParameter("user", str, description="uid"),
    OpenApiParameter("site", str, description="code"),
    OpenApiParameter("kind", str, enum=LedgerEntry.Kind.values),
    OpenApiParameter("day", date, description="Local day of use, e.g. 2026-05-31"),
    OpenApiParameter("q", str, description="R-17, an entry number, person, cost code, node or card"),
]


@extend_schema(tags=["money"])
class PriceViewSet(ApiViewSet):
    """Price versions: for finance and auditors; finance sets them."""

    serializer_class = PriceSerializer
    queryset = PriceRate.objects.none()

    def get_queryset(self) -> Any:
        self.policy.require(self.policy.has(Role.FINANCE, Role.AUDITOR, Role.POOL_ADMIN))
        found = rates(site_code=self.request.query_params.get("site"))
        code = self.request.query_params.get("flavour")
        return found.filter(flavour__code=code) if code else found

    @extend_schema(parameters=[FILTERS[2], FILTERS[4]])
    def list(self, request: Request) -> Response:
        """All versions in order of flavour, site and time."""
        page = self.paginate_queryset(self.get_queryset())
        return self.get_paginated_response(PriceSerializer(page, many=True).data)

    def retrieve(self, request: Request, uid: str) -> Response:
        """One version."""
        rate = self.get_queryset().filter(uid=uid).first()
        if rate is None:
            raise NotFound(code="not_found", detail=_("There is no such price."))
        return Response(PriceSerializer(rate).data)

    @extend_schema(request=PriceInput, responses={201: PriceSerializer})
    def create(self, request: Request) -> Response:
        """Put a price in force; the one before it ends then."""
        self.policy.require(self.policy.keeps_books)
        given = PriceInput(data=request.data)
        given.is_valid(raise_exception=True)
        data = given.validated_data
        flavour = GpuFlavour.objects.filter(code=data["flavour"]).first()
        if flavour is None:
            raise Invalid.field("flavour", _("There is no flavour of this code."))
        department = None
        if data["department"]:
            department = Department.objects.without_tree_fields().filter(code=data["department"]).first()
            if department is None:
                raise Invalid.field("department", _("There is no department of this code."))
        rate = rate_set(
            acting_user=self.actor,
            flavour=flavour,
            department=department,
            micro_per_gpu_hour=data["micro_per_gpu_hour"],
            list_micro_per_gpu_hour=data["list_micro_per_gpu_hour"],
            power_micro_per_gpu_hour=data["power_micro_per_gpu_hour"],
            idle_micro_per_gpu_hour=data["idle_micro_per_gpu_hour"],
            valid_from=data.get("valid_from") or now(),
            site_code=data["site"],
            book=data["book"],
            reason=data["reason"],
        )
        return Response(PriceSerializer(rate).data, status=status.HTTP_201_CREATED)

    @extend_schema(
        operation_id="prices_import",
        request={"multipart/form-data": PriceFile},
        responses={200: dict},
    )
    def take_file(self, request: Request) -> Response:
        """Set the prices of a file, all rows or none; with `dry_run` only say what it would do. Problems come by
        row and column. The export for machines can come back.
        """
        self.policy.require(self.policy.keeps_books)
        given = PriceFile(data=request.data)
        given.is_valid(raise_exception=True)
        data = given.validated_data
        rows = prices_import(
            acting_user=self.actor, file=data["file"].read(), reason=data["reason"], dry_run=data["dry_run"]
        )
        results = [
            {
                "row": row.number,
                "flavour": row.flavour.code,
                "site": row.site,
                "department": row.department.code if row.department is not None else "",
                "micro_per_gpu_hour": row.micro,
                "list_micro_per_gpu_hour": row.list_micro,
                "power_micro_per_gpu_hour": row.power_micro,
                "idle_micro_per_gpu_hour": row.idle_micro,
                "valid_from": row.valid_from,
                "new": row.new,
            }
            for row in rows
        ]
        return Response({"dry_run": data["dry_run"], "count": len(results), "results": results})


@extend_schema(tags=["money"])
class LedgerViewSet(ApiViewSet):
    """Booked ledger lines that the caller may see, newest first."""

    serializer_class = LineSerializer
    queryset = LedgerEntry.objects.none()

    def _lines(self) -> Lines:
        return Lines(self.policy, line_filter(self.request.query_params, self.policy))

    @extend_schema(parameters=FILTERS)
    def list(self, request: Request) -> Response:
        """A page of lines."""
        page = self.paginate_queryset(self._lines().booked())
        return self.get_paginated_response(LineSerializer(page, many=True).data)

    def retrieve(self, request: Request, uid: str) -> Response:
        """One line."""
        return Response(LineSerializer(self._line(uid)).data)

    @extend_schema(request=CorrectionInput, responses={201: LineSerializer})
    def correct(self, request: Request, uid: str) -> Response:
        """Book a correction of this line: adds a row."""
        line = self._line(uid)
        given = CorrectionInput(data=request.data)
        given.is_valid(raise_exception=True)
        correction = correction_book(acting_user=self.actor, entry_uid=line.uid, **given.validated_data)
        return Response(LineSerializer(correction).data, status=status.HTTP_201_CREATED)

    def _line(self, uid: str) -> LedgerEntry:
        line = self._lines().booked().filter(uid=uid).first()
        if line is None:
            raise NotFound(code="not_found", detail=_("There is no such line in the ledger."))
        return line


BY = list(GROUPINGS)


def _sums(total: Total) -> dict[str, int]:
    return {"gpu_ms": total.gpu_ms, "amount_micro": total.amount_micro, "lines": total.lines}


@extend_schema(tags=["money"])
class MonthViewSet(ApiViewSet):
    """Months of the books: totals and groups, exactly as on the page."""

    queryset = LedgerEntry.objects.none()
    serializer_class = LineSerializer
    pagination_class = None
    lookup_field = "month"
    lookup_value_regex = r"\d{4}-\d{2}"

    @extend_schema(operation_id="months_overview", responses={200: dict})
    def list(self, request: Request) -> Response:
        """Months from the first booked one to the present one."""
        rows = [
            {
                "month": f"{m.month:%Y-%m}",
                "closed": m.closed,
                "present": m.present,
                "zone": billing_zone().key,
            }
            for m in book_months()
        ]
        return Response({"count": len(rows), "results": rows})

    @extend_schema(parameters=[*FILTERS[1:5], OpenApiParameter("by", str, enum=BY)], responses={200: dict})
    @one_look()
    def retrieve(self, request: Request, month: str) -> Response:
        """A month grouped by department, flavour, user or site; the running part is told apart."""
        by = request.query_params.get("by", "department")
        if by not in GROUPINGS:
            raise Invalid.field("by", _("Known groupings: department, flavour, user, site."))
        chosen = line_filter({**request.query_params.dict(), "month": month}, self.policy)
        report = month_report(self.policy, chosen, by)
        mark, _booked_at = ledger_mark()
        return Response(
            {
                "month": month,
                "by": by,
                "zone": billing_zone().key,
                "currency": settings.GPUPOOL_CURRENCY,
                "from": report.start,
                "until": report.until,
                "ledger_to_entry": mark,
                "total": _sums(report.total),
                "running": _sums(report.running),
                "corrections": _sums(report.corrections),
                "groups": [
                    {"label": g.label, "params": g.params, "own": g.own, **_sums(g.total)}
                    for g in report.groups
                ],
            }
        )

    @extend_schema(request=None, responses={200: dict})
    def close(self, request: Request, month: str) -> Response:
        """Close a month for good; 409 with the failing checks when it is not ready."""
        first: date = month_from(month)
        if first > month_of(now()):
            raise Invalid.field("month", _("This month has not begun."))
        row = month_close(acting_user=self.actor, month=first)
        return Response(
            {"month": month, "closed_at": row.closed_at, "closed_by": row.closed_by_name, **row.totals}
        )
