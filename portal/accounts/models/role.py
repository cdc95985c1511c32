"""Roles, bound to a department's subtree or to the whole installation, for a time."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _

from portal.accounts.models.department import Department
from portal.kernel.clock import now
from portal.kernel.models import PublicModel


class Role(models.TextChoices):
    """What a person may do; the policy (portal.accounts.policy) gives the details."""

    RESEARCHER = "researcher", _("Researcher")
    LEAD = "lead", _("Department lead")
    POOL_ADMIN = "pool_admin", _("Pool administrator")
    FINANCE = "finance", _("Finance")
    AUDITOR = "auditor", _("Auditor")


class RoleBinding(PublicModel):
    """`user` has `role` over `department` and all below it; a null department means the installation."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="role_bindings")
    role = models.CharField(max_length=16, choices=Role.choices)
    department = models.ForeignKey(
        Department, on_delete=models.PROTECT, null=True, blank=True, related_name="role_bindings"
    )
    valid_from = models.DateTimeField(default=now)
    valid_to = models.DateTimeField(null=True, blank=True, help_text="exclusive; null: until withdrawn")
    granted_by_name = models.CharField(max_length=200, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["user", "role", "department"],
                condition=models.Q(valid_to=None),
                nulls_distinct=False,
                name="role_binding_once",
            ),
            models.CheckConstraint(
                condition=models.Q(valid_to=None) | models.Q(valid_to__gt=models.F("valid_from")),
                name="role_binding_ends_after_start",
            ),
        ]
        indexes = [models.Index(fields=["role", "department"], name="role_by_department")]

    def __str__(self) -> str:
        return f"{self.user} {self.role} {self.department or '*'}"
