"""API of people, departments, roles and tokens. The same services as the pages."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import Http404
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import mixins
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from portal.accounts.api import serializers as s
from portal.accounts.api.base import ApiViewSet
from portal.accounts.api.params import (
    bool_param,
    choice_param,
    department_param,
    query,
    sort_param,
    uuid_param,
)
from portal.accounts.models import ApiToken, Department, Role, RoleBinding, User
from portal.accounts.selectors.people import people_list, people_visible, sees_people, valid_bindings
from portal.accounts.selectors.roles import (
    ROLE_STATES,
    TOKEN_STATES,
    bindings_list,
    bindings_visible,
    tokens_in_state,
    tokens_visible,
)
from portal.accounts.services import (
    department_close,
    department_create,
    department_move,
    department_reopen,
    department_update,
    password_reset,
    preferences_save,
    role_grant,
    role_withdraw,
    token_create,
    token_revoke,
    token_rotate,
    user_create,
    user_reactivate,
    user_suspend,
    user_update,
)
from portal.accounts.services.common import temporary_password
from portal.kernel.api import check_if_match, etag

ORDERS = [f"{minus}{name}" for name in ("name", "username", "last_login") for minus in ("", "-")]


def valid(serializer: Any) -> dict[str, Any]:
    """The validated data, or a 400 with every problem."""
    serializer.is_valid(raise_exception=True)
    return dict(serializer.validated_data)


@extend_schema_view(
    list=extend_schema(
        parameters=[
            query("q", "in name, user name, mail or account"),
            query("department", "uid or code; with all below it"),
            query("role", "who holds it now", enum=Role.values),
            query("active", "true or false", OpenApiTypes.BOOL),
            query("ordering", "minus reverses", enum=ORDERS),
        ]
    )
)
class UserViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """People: those of one's departments; administrators of people make and change them."""

    queryset = User.objects.none()
    serializer_class = s.UserSerializer
    secret_fields = frozenset({"temporary_password"})

    def get_queryset(self) -> QuerySet[User]:
        """Visible people, filtered."""
        if self.action != "list":
            return people_visible(self.policy)
        department = department_param(self.request, self.policy.tree)
        active = bool_param(self.request, "active")
        return people_list(
            self.policy,
            search=self.request.query_params.get("q", "").strip()[:100],
            department_id=department.pk if department is not None else None,
            role=choice_param(self.request, "role", Role.values),
            state={None: "", True: "active", False: "suspended"}[active],
            sort=sort_param(self.request, ("name", "username", "last_login"), "name"),
        )

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """One person, with its ETag."""
        row = self.get_object()
        return Response(self.get_serializer(row).data, headers=etag(row.version))

    @extend_schema(request=s.UserNew, responses={201: s.UserMade})
    def create(self, request: Request) -> Response:
        """Make a person without roles."""
        data = valid(s.UserNew(data=request.data, context=self.get_serializer_context()))
        given = data.pop("password", None)
        value = given or temporary_password()
        user = user_create(acting_user=self.actor, password=value, **data)
        return self._made(user, None if given else value, 201)

    def _made(self, user: User, value: str | None, status: int) -> Response:
        user.temporary_password = value  # type: ignore[attr-defined]
        body = s.UserMade(user, context=self.get_serializer_context()).data
        headers = {**etag(user.version), "Cache-Control": "no-store"}
        return Response(body, status=status, headers=headers)

    @extend_schema(request=s.UserChange, responses=s.UserSerializer)
    def partial_update(self, request: Request, uid: str) -> Response:
        """Change fields; `If-Match` guards against a change in between."""
        row = self.get_object()
        check_if_match(request, row.version)
        data = valid(s.UserChange(data=request.data, context=self.get_serializer_context()))
        guarded = row.version if request.headers.get("If-Match") else None
        fresh = user_update(acting_user=self.actor, user=row, expected_version=guarded, **data)
        return self._one(fresh)

    def _one(self, row: User) -> Response:
        return Response(self.get_serializer(row).data, headers=etag(row.version))

    @extend_schema(request=s.Suspend, responses=s.UserSerializer)
    @action(detail=True, methods=["post"])
    def suspend(self, request: Request, uid: str) -> Response:
        """End the access at once: sessions, tokens; leases as chosen."""
        data = valid(s.Suspend(data=request.data))
        return self._one(user_suspend(acting_user=self.actor, user=self.get_object(), **data))

    @extend_schema(request=s.OptionalReason, responses=s.UserSerializer)
    @action(detail=True, methods=["post"])
    def reactivate(self, request: Request, uid: str) -> Response:
        """Let in again."""
        data = valid(s.OptionalReason(data=request.data))
        return self._one(user_reactivate(acting_user=self.actor, user=self.get_object(), **data))

    @extend_schema(request=None, responses=s.UserMade)
    @action(detail=True, methods=["post"])
    def password(self, request: Request, uid: str) -> Response:
        """Give a temporary password, shown once."""
        user, value = password_reset(acting_user=self.actor, user=self.get_object())
        return self._made(user, value, 200)


class MeViewSet(ApiViewSet):
    """Oneself."""

    queryset = User.objects.none()
    serializer_class = s.MeSerializer
    token_scope = "request"
    pagination_class = None

    @extend_schema(responses=s.MeSerializer, operation_id="me_retrieve")
    def list(self, request: Request) -> Response:
        """Who asks, with which roles and scopes."""
        return self._me(User.objects.select_related("home_department").get(pk=request.user.pk))

    @extend_schema(request=s.PreferencesChange, responses=s.MeSerializer)
    def partial_update(self, request: Request) -> Response:
        """Own language, time zone and theme."""
        data = valid(s.PreferencesChange(data=request.data))
        me = User.objects.select_related("home_department").get(pk=request.user.pk)
        return self._me(preferences_save(acting_user=self.actor, user=me, **data))

    def _me(self, user: User) -> Response:
        bindings = valid_bindings().filter(user=user).select_related("department").order_by("role", "id")
        user.roles = [  # type: ignore[attr-defined]
            {
                "role": b.role,
                "department": b.department.uid if b.department is not None else None,
                "department_code": b.department.code if b.department is not None else None,
                "valid_to": b.valid_to,
            }
            for b in bindings
        ]
        auth = self.request.auth
        user.token_scopes = list(auth.scopes) if isinstance(auth, ApiToken) else None  # type: ignore[attr-defined]
        return Response(self.get_serializer(user).data, headers=etag(user.version))


@extend_schema_view(
    list=extend_schema(
        parameters=[
            query("code", "exact code"),
            query("parent", "uid or code of the department above"),
            query("open", "true or false", OpenApiTypes.BOOL),
            query("below", "uid or code; it and all below it"),
        ]
    )
)
class DepartmentViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """The department tree: the parts that one leads, administers, audits, or may ask for."""

    queryset = Department.objects.none()
    serializer_class = s.DepartmentSerializer

    def get_queryset(self) -> QuerySet[Department]:
        """Visible departments, filtered."""
        scope = sees_people(self.policy) | self.policy.asks_for
        rows = (
            Department.objects.without_tree_fields().filter(scope.q("id")).order_by("position", "name", "id")
        )
        if self.action != "list":
            return rows
        tree = self.policy.tree
        if code := self.request.query_params.get("code", ""):
            rows = rows.filter(code=code)
        if (parent := department_param(self.request, tree, "parent")) is not None:
            rows = rows.filter(parent_id=parent.pk)
        if (top := department_param(self.request, tree, "below")) is not None:
            rows = rows.filter(pk__in=tree.subtree(top.pk))
        if (still_open := bool_param(self.request, "open")) is not None:
            rows = rows.filter(closed_at__isnull=still_open)
        return rows

    def _one(self, row: Department, status: int = 200) -> Response:
        self.__dict__.pop("_policy", None)  # the tree has changed
        return Response(self.get_serializer(row).data, status=status, headers=etag(row.version))

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """One department, with its ETag."""
        return self._one(self.get_object())

    @extend_schema(request=s.DepartmentNew, responses={201: s.DepartmentSerializer})
    def create(self, request: Request) -> Response:
        """Add a department."""
        data = valid(s.DepartmentNew(data=request.data, context=self.get_serializer_context()))
        return self._one(department_create(acting_user=self.actor, **data), 201)

    def _guarded(self, request: Request) -> tuple[Department, int | None]:
        row = self.get_object()
        check_if_match(request, row.version)
        return row, row.version if request.headers.get("If-Match") else None

    @extend_schema(request=s.DepartmentChange, responses=s.DepartmentSerializer)
    def partial_update(self, request: Request, uid: str) -> Response:
        """Rename, or change cost centre or position."""
        row, version = self._guarded(request)
        data = valid(s.DepartmentChange(data=request.data))
        return self._one(
            department_update(acting_user=self.actor, department=row, expected_version=version, **data)
        )

    @extend_schema(request=s.DepartmentMove, responses=s.DepartmentSerializer)
    @action(detail=True, methods=["post"])
    def move(self, request: Request, uid: str) -> Response:
        """Hang it with all below it under another one, or at the top."""
        row, version = self._guarded(request)
        data = valid(s.DepartmentMove(data=request.data, context=self.get_serializer_context()))
        return self._one(
            department_move(acting_user=self.actor, department=row, expected_version=version, **data)
        )

    @extend_schema(request=s.CloseReason, responses=s.DepartmentSerializer)
    @action(detail=True, methods=["post"])
    def close(self, request: Request, uid: str) -> Response:
        """Close it: nobody asks on its behalf any more."""
        row, version = self._guarded(request)
        data = valid(s.CloseReason(data=request.data))
        return self._one(
            department_close(acting_user=self.actor, department=row, expected_version=version, **data)
        )

    @extend_schema(request=None, responses=s.DepartmentSerializer)
    @action(detail=True, methods=["post"])
    def reopen(self, request: Request, uid: str) -> Response:
        """Open it again."""
        return self._one(department_reopen(acting_user=self.actor, department=self.get_object()))


@extend_schema_view(
    list=extend_schema(
        parameters=[
            query("user", "uid of a person", OpenApiTypes.UUID),
            query("role", "role", enum=Role.values),
            query("department", "uid or code; with all below it"),
            query("state", "valid (default), future, ended, all", enum=ROLE_STATES),
        ]
    )
)
class RoleBindingViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """Who holds which role where. Pool administrators of the installation bind and end."""

    queryset = RoleBinding.objects.none()
    serializer_class = s.RoleBindingSerializer

    def get_queryset(self) -> QuerySet[RoleBinding]:
        """Visible bindings, filtered."""
        if self.action != "list":
            return bindings_visible(self.policy)
        department = department_param(self.request, self.policy.tree)
        rows = bindings_list(
            self.policy,
            role=choice_param(self.request, "role", Role.values),
            state=choice_param(self.request, "state", ROLE_STATES, "valid"),
            department_id=department.pk if department is not None else None,
        )
        user = uuid_param(self.request, "user")
        return rows.filter(user__uid=user) if user is not None else rows

    @extend_schema(request=s.RoleBindingNew, responses={201: s.RoleBindingSerializer})
    def create(self, request: Request) -> Response:
        """Bind a role."""
        data = valid(s.RoleBindingNew(data=request.data, context=self.get_serializer_context()))
        user = people_visible(self.policy).filter(uid=data.pop("user")).first()
        if user is None:
            raise Http404
        row = role_grant(acting_user=self.actor, user=user, **data)
        return Response(self.get_serializer(row).data, status=201, headers=etag(row.version))

    @extend_schema(request=s.OptionalReason, responses=s.RoleBindingSerializer)
    @action(detail=True, methods=["post"])
    def end(self, request: Request, uid: str) -> Response:
        """End it now."""
        data = valid(s.OptionalReason(data=request.data))
        row = role_withdraw(acting_user=self.actor, binding=self.get_object(), **data)
        return Response(self.get_serializer(row).data, headers=etag(row.version))


@extend_schema_view(
    list=extend_schema(
        parameters=[
            query("user", "uid of a person (administrators and auditors)", OpenApiTypes.UUID),
            query("state", "valid (default), over, all", enum=TOKEN_STATES),
        ]
    )
)
class TokenViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ApiViewSet):
    """API tokens. Made and rotated by their owner, revoked by the owner or an administrator."""

    queryset = ApiToken.objects.none()
    serializer_class = s.TokenSerializer
    secret_fields = frozenset({"value"})

    def token_scope(self, request: Request) -> str:  # type: ignore[override]
        """A token may rotate or revoke itself whatever its scopes; else `admin` is needed."""
        auth = request.auth
        own = isinstance(auth, ApiToken) and str(auth.uid) == str(self.kwargs.get("uid", "")).lower()
        return str(auth.scopes[0]) if own and auth.scopes else "admin"

    def get_queryset(self) -> QuerySet[ApiToken]:
        """Own tokens, or all for those who administer people or audit."""
        rows = tokens_visible(self.policy)
        if self.action != "list":
            return rows
        user = uuid_param(self.request, "user")
        if user is not None:
            rows = rows.filter(user__uid=user)
        return tokens_in_state(rows, choice_param(self.request, "state", TOKEN_STATES, "valid"))

    def _made(self, token: ApiToken, value: str, status: int) -> Response:
        token.value = value  # type: ignore[attr-defined]
        body = s.TokenMade(token, context=self.get_serializer_context()).data
        return Response(body, status=status, headers={"Cache-Control": "no-store"})

    @extend_schema(request=s.TokenNew, responses={201: s.TokenMade})
    def create(self, request: Request) -> Response:
        """Make a token of one's own; its value is in this answer only."""
        data = valid(s.TokenNew(data=request.data))
        token, value = token_create(acting_user=self.actor, user=request.user, **data)  # type: ignore[arg-type]
        return self._made(token, value, 201)

    @extend_schema(request=s.OptionalReason, responses=s.TokenSerializer)
    @action(detail=True, methods=["post"])
    def revoke(self, request: Request, uid: str) -> Response:
        """End it at once."""
        data = valid(s.OptionalReason(data=request.data))
        return Response(
            self.get_serializer(token_revoke(acting_user=self.actor, token=self.get_object(), **data)).data
        )

    @extend_schema(request=None, responses=s.TokenMade)
    @action(detail=True, methods=["post"])
    def rotate(self, request: Request, uid: str) -> Response:
        """Replace it by a fresh one of the same name, scopes and length of life."""
        token, value = token_rotate(acting_user=self.actor, token=self.get_object())
        return self._made(token, value, 200)
