"""Departments: a tree. A project is a leaf department."""

from __future__ import annotations

from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import DateTimeRangeField, RangeOperators
from django.db import models
from django.utils.translation import gettext_lazy as _
from tree_queries.fields import TreeNodeForeignKey
from tree_queries.query import TreeQuerySet

from portal.kernel.models import PublicModel


class Department(PublicModel):
    """A node of the organisation's tree. Moved and renamed freely, closed rather than deleted."""

    parent = TreeNodeForeignKey(
        "self",
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="children",
        verbose_name=_("parent"),
    )
    code = models.CharField(
        _("code"), max_length=48, unique=True, help_text=_("short and stable, e.g. vision")
    )
    name = models.CharField(_("name"), max_length=120)
    cost_center = models.CharField(_("cost centre"), max_length=48, blank=True)
    position = models.PositiveIntegerField(default=0)
    closed_at = models.DateTimeField(null=True, blank=True)

    objects = TreeQuerySet.as_manager()

    class Meta:
        ordering = ["position", "name", "id"]
        constraints = [
            models.CheckConstraint(
                condition=~models.Q(parent=models.F("id")), name="department_not_own_parent"
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def is_open(self) -> bool:
        """Whether people may still ask on its behalf."""
        return self.closed_at is None


class DepartmentName(models.Model):
    """What a department was called, and under whom, during a time: reports show names as they were then."""

    id = models.BigAutoField(primary_key=True)
    department = models.ForeignKey(Department, on_delete=models.PROTECT, related_name="names")
    name = models.CharField(max_length=120)
    path = models.CharField(max_length=600, help_text="names from the root, joined by ' / '")
    during = DateTimeRangeField()

    class Meta:
        constraints = [
            ExclusionConstraint(
                name="department_name_one_at_a_time",
                expressions=[("department", RangeOperators.EQUAL), ("during", RangeOperators.OVERLAPS)],
            ),
        ]

    def __str__(self) -> str:
        return self.path
