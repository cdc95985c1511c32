"""Shapes of people, departments, roles and tokens in the API. Public ids are `uid`; times are UTC."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from portal.accounts.models import ApiToken, Department, Role, RoleBinding, User
from portal.accounts.services.tokens import SCOPES


class DepartmentRef(serializers.Field):
    """A department by uid, on both sides; the view's `policy` holds the tree."""

    def to_representation(self, value: Department) -> str:
        """Its uid."""
        return str(value.uid)

    def to_internal_value(self, data: Any) -> Department:
        """The row of that uid."""
        tree = self.context["view"].policy.tree
        found = next((row for row in tree.rows.values() if str(row.uid) == str(data).lower()), None)
        if found is None:
            raise serializers.ValidationError(_("There is no such department."), code="unknown_department")
        return found


@extend_schema_field({"type": "string", "format": "uuid", "nullable": True})
class OptionalDepartment(DepartmentRef):
    """A department, or null."""


class UserSerializer(serializers.ModelSerializer):
    """A person."""

    home_department = OptionalDepartment(required=False, allow_null=True)

    class Meta:
        model = User
        fields = (
            "uid",
            "username",
            "display_name",
            "email",
            "home_department",
            "system_account",
            "language",
            "time_zone",
            "is_active",
            "suspended_at",
            "must_change_password",
            "date_joined",
            "last_login",
            "version",
        )
        read_only_fields = fields


class UserChange(serializers.Serializer):
    """What may be changed of a person."""

    display_name = serializers.CharField(required=False, max_length=120)
    email = serializers.CharField(required=False, max_length=254, allow_blank=True)
    home_department = OptionalDepartment(required=False, allow_null=True)
    system_account = serializers.CharField(required=False, max_length=32, allow_blank=True)
    language = serializers.ChoiceField(required=False, choices=settings.LANGUAGES)
    time_zone = serializers.CharField(required=False, max_length=64, allow_blank=True)


class UserNew(UserChange):
    """A person to make. Without `password` a temporary one comes back once."""

    username = serializers.CharField(max_length=64)
    display_name = serializers.CharField(max_length=120)
    password = serializers.CharField(required=False, write_only=True, trim_whitespace=False, max_length=200)


class UserMade(UserSerializer):
    """A person just made or reset; `temporary_password` is shown once."""

    temporary_password = serializers.CharField(read_only=True, allow_null=True)

    class Meta(UserSerializer.Meta):
        fields = (*UserSerializer.Meta.fields, "temporary_password")
        read_only_fields = fields


class Suspend(serializers.Serializer):
    """Why a person is suspended, and what becomes of the leases."""

    reason = serializers.CharField(max_length=500)
    leases = serializers.ChoiceField(choices=["end", "keep"], default="end")


class CloseReason(serializers.Serializer):
    """Why."""

    reason = serializers.CharField(max_length=500)


class OptionalReason(serializers.Serializer):
    """Why, if there is something to say."""

    reason = serializers.CharField(max_length=500, required=False, allow_blank=True, default="")


class DepartmentSerializer(serializers.ModelSerializer):
    """A department. `path` holds the names from the root."""

    parent = serializers.SerializerMethodField()
    path = serializers.SerializerMethodField()

    class Meta:
        model = Department
        fields = (
            "uid",
            "code",
            "name",
            "parent",
            "path",
            "cost_center",
            "position",
            "closed_at",
            "created_at",
            "updated_at",
            "version",
        )
        read_only_fields = fields

    @extend_schema_field({"type": "string", "format": "uuid", "nullable": True})
    def get_parent(self, row: Department) -> str | None:
        """Uid of the department above."""
        rows = self.context["view"].policy.tree.rows
        return str(rows[row.parent_id].uid) if row.parent_id in rows else None

    def get_path(self, row: Department) -> str:
        """Names from the root, joined by ` / `."""
        tree = self.context["view"].policy.tree
        return str(tree.path(row.pk)) if row.pk in tree.rows else row.name


class DepartmentChange(serializers.Serializer):
    """What may be changed of a department; moving has its own act."""

    name = serializers.CharField(required=False, max_length=120)
    cost_center = serializers.CharField(required=False, max_length=48, allow_blank=True)
    position = serializers.IntegerField(required=False)


class DepartmentNew(serializers.Serializer):
    """A department to make."""

    code = serializers.CharField(max_length=48)
    name = serializers.CharField(max_length=120)
    parent = OptionalDepartment(required=False, allow_null=True, default=None)
    cost_center = serializers.CharField(required=False, max_length=48, allow_blank=True, default="")
    position = serializers.IntegerField(required=False, default=0)


class DepartmentMove(serializers.Serializer):
    """Where it shall hang; null is the top."""

    parent = OptionalDepartment(allow_null=True)


class RoleBindingSerializer(serializers.ModelSerializer):
    """A role of a person over a department and all below it; null is the whole installation."""

    user = serializers.UUIDField(source="user.uid", read_only=True)
    username = serializers.CharField(source="user.username", read_only=True)
    department = OptionalDepartment(read_only=True, allow_null=True)

    class Meta:
        model = RoleBinding
        fields = (
            "uid",
            "user",
            "username",
            "role",
            "department",
            "valid_from",
            "valid_to",
            "granted_by_name",
            "version",
        )
        read_only_fields = fields


class RoleBindingNew(serializers.Serializer):
    """A role to bind."""

    user = serializers.UUIDField()
    role = serializers.ChoiceField(choices=Role.choices)
    department = OptionalDepartment(required=False, allow_null=True, default=None)
    valid_from = serializers.DateTimeField(required=False, allow_null=True, default=None)
    valid_to = serializers.DateTimeField(required=False, allow_null=True, default=None)


class TokenSerializer(serializers.ModelSerializer):
    """A token without its value."""

    user = serializers.UUIDField(source="user.uid", read_only=True)
    scopes = serializers.ListField(child=serializers.ChoiceField(choices=SCOPES), read_only=True)

    class Meta:
        model = ApiToken
        fields = (
            "uid",
            "user",
            "name",
            "prefix",
            "scopes",
            "created_at",
            "expires_at",
            "revoked_at",
            "last_used_at",
            "version",
        )
        read_only_fields = fields


class TokenMade(TokenSerializer):
    """A token just made; `value` is shown once."""

    value = serializers.CharField(read_only=True, allow_null=True)

    class Meta(TokenSerializer.Meta):
        fields = (*TokenSerializer.Meta.fields, "value")
        read_only_fields = fields


class TokenNew(serializers.Serializer):
    """A token to make. `expires_at` defaults to 90 days from now."""

    name = serializers.CharField(max_length=80)
    scopes = serializers.ListField(child=serializers.ChoiceField(choices=SCOPES), min_length=1)
    expires_at = serializers.DateTimeField(required=False, allow_null=True, default=None)


class HeldRole(serializers.Serializer):
    """A role that holds now."""

    role = serializers.CharField()
    department = serializers.UUIDField(allow_null=True)
    department_code = serializers.CharField(allow_null=True)
    valid_to = serializers.DateTimeField(allow_null=True)


class MeSerializer(UserSerializer):
    """Oneself: with the roles held now, and the scopes of the token that asks (null: a session)."""

    roles = HeldRole(many=True, read_only=True)
    token_scopes = serializers.ListField(child=serializers.CharField(), read_only=True, allow_null=True)
    theme = serializers.CharField(read_only=True)

    class Meta(UserSerializer.Meta):
        fields = (*UserSerializer.Meta.fields, "theme", "roles", "token_scopes")
        read_only_fields = fields


class PreferencesChange(serializers.Serializer):
    """Own language, zone and theme."""

    language = serializers.ChoiceField(required=False, choices=settings.LANGUAGES)
    time_zone = serializers.CharField(required=False, max_length=64, allow_blank=True)
    theme = serializers.ChoiceField(required=False, choices=User.Theme.choices)
