"""Query parameters of lists, parsed strictly: a wrong value is 400, never ignored."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from django.utils.translation import gettext_lazy as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request

from portal.accounts.models import Department
from portal.accounts.policy import DepartmentTree
from portal.kernel.api_documented import TRUTH
from portal.kernel.errors import Invalid


def query(
    name: str, text: str, kind: object = OpenApiTypes.STR, enum: Iterable[str] | None = None
) -> OpenApiParameter:
    """The description of a query parameter."""
    return OpenApiParameter(name, kind, description=text, enum=list(enum) if enum else None)


def uuid_param(request: Request, name: str) -> UUID | None:
    """A uid, or None where it is not sent."""
    value = request.query_params.get(name, "")
    if not value:
        return None
    try:
        return UUID(value)
    except ValueError as error:
        raise Invalid.field(name, _("This is no uid.")) from error


def choice_param(request: Request, name: str, known: Iterable[str], default: str = "") -> str:
    """One of the known words."""
    value = request.query_params.get(name, "")
    allowed = list(known)
    if value and value not in allowed:
        raise Invalid.field(name, _("One of: %(known)s.") % {"known": ", ".join(allowed)})
    return value or default


def bool_param(request: Request, name: str) -> bool | None:
    """true or false, or None where it is not sent."""
    return TRUTH.get(choice_param(request, name, TRUTH))


def department_param(request: Request, tree: DepartmentTree, name: str = "department") -> Department | None:
    """A department by uid or code; an unknown one is 400."""
    value = request.query_params.get(name, "")
    if not value:
        return None
    found = next((row for row in tree.rows.values() if value in (str(row.uid), row.code)), None)
    if found is None:
        raise Invalid.field(name, _("There is no such department."))
    return found


def sort_param(request: Request, known: Iterable[str], default: str) -> str:
    """`ordering`: a known name, with a minus for the reverse."""
    value = request.query_params.get("ordering", "") or default
    if value.lstrip("-") not in set(known):
        raise Invalid.field("ordering", _("One of: %(known)s.") % {"known": ", ".join(known)})
    return value
