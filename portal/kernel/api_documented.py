"""What the OpenAPI document says of an operation is all that the operation takes.

A mixin of view sets compares each call with its own description (`@extend_schema`): query parameters that are not
described, values outside a described list, text where a number, a uid or true/false is described, and members of the
body that the described input does not have are 400, never ignored. A mistyped filter would show too much, a mistyped
field would leave a limit unset.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.utils.translation import gettext as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from rest_framework.pagination import CursorPagination, PageNumberPagination
from rest_framework.request import Request
from rest_framework.serializers import Serializer

from portal.kernel.errors import Invalid

INTEGER = re.compile(r"-?[0-9]{1,18}")
TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Operation:
    """Query parameters by name, and the names that a body may have (None: the body is not described by fields)."""

    parameters: Mapping[str, OpenApiParameter]
    members: frozenset[str] | None


_OPERATIONS: dict[tuple[type, str, str], Operation] = {}


class AsDocumented:
    """Put before a DRF view set."""

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """After sign-in and permission, before anything is looked up."""
        super().initial(request, *args, **kwargs)  # type: ignore[misc]
        operation = _operation(self, request)
        if operation is None:
            return
        unknown = sorted(set(request.query_params) - set(operation.parameters) - _paging(self) - {"format"})
        if unknown:
            raise Invalid(
                code="unknown_filter",
                detail=_("This list has no filter of that name."),
                errors=[{"pointer": name, "detail": _("unknown filter")} for name in unknown],
            )
        if wrong := list(_wrong_values(request, operation.parameters)):
            raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=wrong)
        _refuse_unknown_members(request, operation.members)


def _operation(view: Any, request: Request) -> Operation | None:
    method, action = str(request.method), view.action
    handler = getattr(view, action or "", None)
    if handler is None or method == "OPTIONS":
        return None
    key = (type(view), action, method)
    if key not in _OPERATIONS:
        described = getattr(handler, "kwargs", {}).get("schema") or type(type(view).schema)
        schema = described()
        schema.view, schema.method = view, method
        parameters = {
            one.name: one
            for one in schema.get_override_parameters()
            if isinstance(one, OpenApiParameter) and one.location == OpenApiParameter.QUERY
        }
        writes = method not in ("GET", "HEAD")
        _OPERATIONS[key] = Operation(
            parameters, _members(schema.get_request_serializer()) if writes else None
        )
    return _OPERATIONS[key]


def _members(described: Any) -> frozenset[str] | None:
    """Names that a described body takes: those of its fields that can be written; none where it has no body."""
    if described is None:
        return frozenset()
    if isinstance(described, Mapping):
        described = next(iter(described.values()))
    if inspect.isclass(described) and issubclass(described, Serializer):
        described = described()
    if not isinstance(described, Serializer):
        return None
    return frozenset(name for name, field in described.fields.items() if not field.read_only)


def _paging(view: Any) -> set[str]:
    """Names that the list's way of paging takes."""
    pages = getattr(view, "pagination_class", None)
    if view.action == "retrieve" or pages is None:
        return set()
    if issubclass(pages, CursorPagination):
        return {"cursor", pages.page_size_query_param or "cursor"}
    return (
        {"page", pages.page_size_query_param or "page"} if issubclass(pages, PageNumberPagination) else set()
    )


def _wrong_values(request: Request, parameters: Mapping[str, OpenApiParameter]) -> Iterator[Any]:
    for name in request.query_params:
        values = request.query_params.getlist(name)
        known = parameters.get(name)
        if len(values) > 1 and not (known and known.many):
            yield {"pointer": name, "detail": _("It is given twice.")}
        elif known is not None and values[-1] and (words := _wrong(values[-1], known)):
            yield {"pointer": name, "detail": words}


def _wrong(value: str, described: OpenApiParameter) -> str:
    """Why a value does not fit its description; empty where it does."""
    if described.enum:
        known = [str(one) for one in described.enum]
        return "" if value in known else _("One of: %(known)s.") % {"known": ", ".join(known)}
    if described.type in (OpenApiTypes.BOOL, bool):
        return "" if value in TRUTH else _("One of: %(known)s.") % {"known": "true, false"}
    if described.type in (OpenApiTypes.INT, int):
        return "" if INTEGER.fullmatch(value) else _("A whole number is needed here.")
    if described.type == OpenApiTypes.UUID:
        try:
            UUID(value)
        except ValueError:
            return _("This is no uid.")
    return ""


def _refuse_unknown_members(request: Request, members: frozenset[str] | None) -> None:
    if members is None:
        return
    sent = request.data
    if not isinstance(sent, Mapping):
        if sent:
            raise Invalid(code="invalid", detail=_("A JSON object is needed here."))
        return
    if unknown := sorted(set(map(str, sent)) - members):
        raise Invalid(
            code="unknown_field",
            detail=_("What was sent has fields that this call does not know. Nothing was done."),
            errors=[{"pointer": name, "detail": _("unknown field")} for name in unknown],
        )


__all__ = ["TRUTH", "AsDocumented", "Operation"]
