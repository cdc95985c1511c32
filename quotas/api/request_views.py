"""API of requests: the same services as the pages, the same refusals."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from portal.accounts.api.base import ApiViewSet
from portal.accounts.api.params import choice_param, department_param
from portal.kernel.api import check_if_match, etag
from portal.kernel.clock import now
from portal.kernel.errors import Invalid
from quotas.api import serializers as s
from quotas.models import CapacityRequest, GpuFlavour
from quotas.selectors.fit import Option
from quotas.selectors.flavours import flavours_on_offer
from quotas.selectors.prices import general_prices
from quotas.selectors.requests import visible_requests, with_open_step
from quotas.selectors.series import progress_of_all
from quotas.services.approvals import request_consent
from quotas.services.asking import read_request
from quotas.services.asking_series import read_after
from quotas.services.dependencies import dependencies_change
from quotas.services.judging import verdict_of
from quotas.services.reader import Reader
from quotas.services.requests import (
    request_change,
    request_clone,
    request_save_draft,
    request_submit,
    request_withdraw,
    wishes_of,
)
from quotas.services.scaling import service_renew, service_signal
from quotas.services.windows import occurrence_move, occurrence_skip
from quotas.transitions import allowed

CONTROL = ("client_token", "draft", "cloned_from")


def body(request: Request) -> Mapping[str, Any]:
    """The JSON object sent; anything else is 400."""
    if not isinstance(request.data, Mapping):
        raise Invalid(code="invalid", detail=_("A JSON object is needed here."))
    return request.data


def is_uuid(text: str) -> bool:
    """Whether a text is a uid."""
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def with_series(rows: QuerySet[CapacityRequest]) -> QuerySet[CapacityRequest]:
    """With steps, the head of a member, and what each waits for."""
    return with_open_step(rows).select_related("cloned_from", "head").prefetch_related("waits_for__on")


class RequestViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Capacity requests."""

    queryset = CapacityRequest.objects.none()
    serializer_class = s.RequestSerializer
    token_scope = "request"

    def get_queryset(self) -> QuerySet[CapacityRequest]:
        """Own requests and those that the person's roles show, newest first."""
        rows = with_series(visible_requests(self.policy)).order_by("-id")
        if self.action != "list":
            return rows
        params = self.request.query_params
        if state := choice_param(self.request, "state", CapacityRequest.State.values):
            rows = rows.filter(state=state)
        if department := department_param(self.request, self.policy.tree):
            rows = rows.filter(department_id__in=self.policy.tree.subtree(department.pk))
        if flavour := params.get("flavour", ""):
            rows = rows.filter(Q(flavour__code=flavour) | Q(options__contains=[flavour]))
        if requester := params.get("requester", ""):
            me = requester == "me"
            rows = (
                rows.filter(requester=self.request.user) if me else rows.filter(requester__username=requester)
            )
        if ref := params.get("ref", ""):
            number = ref.upper().removeprefix("R-")
            rows = rows.filter(pk=int(number[:18])) if number.isdecimal() else rows.none()
        if head := params.get("head", ""):
            rows = rows.filter(head__uid=head) if is_uuid(head) else rows.none()
        if series := choice_param(self.request, "series", CapacityRequest.Series.values):
            rows = rows.filter(series=series)
        if text := params.get("q", "").strip()[:100]:
            rows = rows.filter(Q(purpose__icontains=text) | Q(requester__display_name__icontains=text))
        return rows

    def _answer(self, row: CapacityRequest, status: int = 200) -> Response:
        fresh = with_series(visible_requests(self.policy)).get(pk=row.pk)
        return Response(s.RequestSerializer(fresh).data, status=status, headers=etag(fresh.version))

    @extend_schema(
        parameters=[
            OpenApiParameter("state", str, enum=CapacityRequest.State.values),
            OpenApiParameter("department", str, description="uid or code; with all below it"),
            OpenApiParameter("flavour", str, description="code"),
            OpenApiParameter("requester", str, description="user name, or me"),
            OpenApiParameter("ref", str, description="R-17"),
            OpenApiParameter("head", str, description="uid of a series: its members"),
            OpenApiParameter("series", str, enum=[kind for kind in CapacityRequest.Series.values if kind]),
            OpenApiParameter("q", str, description="in purpose and requester"),
        ]
    )
    def list(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Requests, newest first."""
        page = self.paginate_queryset(self.get_queryset())
        progress = progress_of_all([row for row in page if row.series])
        return self.get_paginated_response(
            s.RequestSerializer(page, many=True, context={"progress": progress}).data
        )

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """One request with its steps, and its ETag."""
        row = self.get_object()
        return Response(self.get_serializer(row).data, headers=etag(row.version))

    @extend_schema(request=s.RequestInput, responses={201: s.RequestSerializer})
    def create(self, request: Request) -> Response:
        """Ask (or keep a draft). Comes back queued where nobody needs to approve."""
        sent = body(request)
        values = {k: v for k, v in sent.items() if k not in CONTROL}
        if sent.get("draft") is True:
            return self._answer(
                request_save_draft(acting_user=self.actor, policy=self.policy, values=values), 201
            )
        token = sent.get("client_token") or ""
        if not isinstance(token, str) or len(token) > 64:
            raise Invalid.field("client_token", _("Text of at most 64 signs."))
        made = request_submit(acting_user=self.actor, policy=self.policy, values=values, client_token=token)
        return self._answer(made, 201)

    @extend_schema(request=s.RequestInput, responses=s.RequestSerializer)
    def partial_update(self, request: Request, uid: str) -> Response:
        """Change an undecided request or a draft; fields that are not sent stay. Honours If-Match."""
        row = self.get_object()
        check_if_match(request, row.version)
        sent = {k: v for k, v in body(request).items() if k not in CONTROL}
        values = {**wishes_of(row), **sent}
        if "flavour" in sent and sent["flavour"] and "requirement" not in sent:
            values["requirement"] = {}
        elif sent.get("requirement") and "flavour" not in sent:
            values["flavour"] = ""
        common: dict[str, Any] = {
            "acting_user": self.actor,
            "policy": self.policy,
            "request": row,
            "values": values,
        }
        if allowed("save", row.state) and row.state == CapacityRequest.State.DRAFT:
            return self._answer(request_save_draft(**common))
        return self._answer(request_change(**common, version=row.version))

    @extend_schema(request=None, responses=s.RequestSerializer)
    @action(detail=True, methods=["post"])
    def submit(self, request: Request, uid: str) -> Response:
        """Submit a draft or a returned request as it is."""
        row = self.get_object()
        check_if_match(request, row.version)
        return self._answer(request_submit(acting_user=self.actor, policy=self.policy, request=row))

    @extend_schema(request=s.WithdrawInput, responses=s.RequestSerializer)
    @action(detail=True, methods=["post"])
    def withdraw(self, request: Request, uid: str) -> Response:
        """Take a request back that holds nothing yet; a series whole, with what runs unless told otherwise."""
        row = self.get_object()
        check_if_match(request, row.version)
        sent = _read(s.WithdrawInput, request)
        return self._answer(
            request_withdraw(
                acting_user=self.actor,
                policy=self.policy,
                request=row,
                reason=str(sent.get("reason", ""))[:500],
                stop_running=sent["stop_running"],
            )
        )

    @extend_schema(request=s.AfterInput, responses=s.RequestSerializer)
    @action(detail=True, methods=["post"])
    def after(self, request: Request, uid: str) -> Response:
        """Change what it waits for, while it is not in line; an empty list lets it in."""
        row = self.get_object()
        check_if_match(request, row.version)
        reader = Reader({"after": _read(s.AfterInput, request)["after"]})
        wanted = read_after(reader, self.policy)
        if reader.problems:
            raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=reader.problems)
        return self._answer(
            dependencies_change(acting_user=self.actor, policy=self.policy, request=row, after=wanted)
        )

    @extend_schema(request=s.SignalInput, responses=s.RequestSerializer)
    @action(detail=True, methods=["post"])
    def signal(self, request: Request, uid: str) -> Response:
        """Tell the load of a service; the number of its replicas follows."""
        value = _read(s.SignalInput, request)["value"]
        return self._answer(service_signal(acting_user=self.actor, request=self.get_object(), value=value))

    @extend_schema(request=s.RenewInput, responses=s.RequestSerializer)
    @action(detail=True, methods=["post"])
    def renew(self, request: Request, uid: str) -> Response:
        """Move the review date of a service."""
        row = self.get_object()
        check_if_match(request, row.version)
        review = _read(s.RenewInput, request)["review_at"]
        return self._answer(service_renew(acting_user=self.actor, request=row, review_at=review))

    @extend_schema(request=s.OccurrenceInput, responses=s.RequestSerializer)
    @action(detail=True, methods=["post"])
    def occurrence(self, request: Request, uid: str) -> Response:
        """Leave one occurrence of a recurring window out, or give it other times. The others stay."""
        row = self.get_object()
        sent = _read(s.OccurrenceInput, request)
        common: dict[str, Any] = {
            "acting_user": self.actor,
            "policy": self.policy,
            "request": row,
            "day": sent["day"],
        }
        if sent["skip"]:
            return self._answer(occurrence_skip(**common, reason=sent.get("reason", "")[:500]))
        if "start_at" not in sent or "end_at" not in sent:
            raise Invalid.field("start_at", _("Say when it begins and ends instead, or skip it."))
        occurrence_move(**common, start_at=sent["start_at"], end_at=sent["end_at"])
        return self._answer(row)

    @extend_schema(request=None, responses={201: s.RequestSerializer})
    @action(detail=True, methods=["post"])
    def clone(self, request: Request, uid: str) -> Response:
        """A draft with the same wishes."""
        return self._answer(
            request_clone(acting_user=self.actor, policy=self.policy, request=self.get_object()), 201
        )

    @extend_schema(request=s.ConsentInput, responses=s.RequestSerializer)
    @action(detail=True, methods=["post"])
    def consent(self, request: Request, uid: str) -> Response:
        """Agree to a changed amount, or not."""
        row = self.get_object()
        check_if_match(request, row.version)
        agree = body(request).get("agree")
        if not isinstance(agree, bool):
            raise Invalid.field("agree", _("true or false is needed here."))
        return self._answer(
            request_consent(acting_user=self.actor, policy=self.policy, request=row, agree=agree)
        )

    @extend_schema(responses=s.EventSerializer(many=True))
    @action(detail=True, methods=["get"])
    def events(self, request: Request, uid: str) -> Response:
        """Its history, newest first."""
        rows = self.paginate_queryset(self.get_object().events.order_by("-id"))
        return self.get_paginated_response(s.EventSerializer(rows, many=True).data)

    @extend_schema(request=s.RequestInput, responses={200: dict})
    @action(detail=False, methods=["post"])
    def fit(self, request: Request) -> Response:
        """Does it fit? The same judgement as on submission; writes nothing."""
        values = {k: v for k, v in body(request).items() if k not in CONTROL}
        cleaned = read_request(values, user=request.user, policy=self.policy, draft=True)
        verdict = verdict_of(cleaned, policy=self.policy)
        names = {pk: row.name for pk, row in self.policy.tree.rows.items()}
        plan = verdict.plan
        return Response(
            {
                "outcome": plan.outcome if plan is not None else None,
                "rules": list(plan.matched) if plan is not None else [],
                "steps": [
                    {"role": x.role, "timeout_hours": x.timeout_hours, "rule": x.rule} for x in plan.steps
                ]
                if plan
                else [],
                "options": [option_json(o, names) for o in verdict.options],
            }
        )


def _read(kind: type[serializers.Serializer[Any]], request: Request) -> dict[str, Any]:
    """A small body, checked."""
    sent = kind(data=dict(body(request)))
    sent.is_valid(raise_exception=True)
    return dict(sent.validated_data)


def option_json(o: Option, names: Mapping[int, str]) -> dict[str, Any]:
    """One option of a verdict."""
    check = o.never or o.admission.blocking
    return {
        "flavour": o.flavour.code,
        "charge_milli": o.charge,
        "cost_micro": o.cost_micro,
        "fits_quota": o.admission.fits,
        "can_ever_start": o.never is None and not o.too_big,
        "available_milli": o.admission.available,
        "used_milli": o.used,
        "guaranteed_milli": o.guaranteed,
        "limit_milli": o.limit,
        "free_milli": o.free,
        "installed_milli": o.installed,
        "blocking": None
        if check is None
        else {
            "level": names.get(int(str(check.level)), "installation"),
            "rule": check.rule,
            "limit": check.limit,
            "used": check.used,
            "requested": check.requested,
        },
    }


class FlavourViewSet(ApiViewSet):
    """Flavours on offer."""

    queryset = GpuFlavour.objects.none()
    serializer_class = s.FlavourSerializer

    def list(self, request: Request) -> Response:
        """All, with capacity, price and MIG profiles."""
        prices = general_prices(now())
        rows = self.paginate_queryset(flavours_on_offer())
        return self.get_paginated_response(
            s.FlavourSerializer(rows, many=True, context={"prices": prices}).data
        )
