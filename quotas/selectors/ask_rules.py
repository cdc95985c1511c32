"""What departments let their people choose."""

from __future__ import annotations

from portal.accounts.policy import DepartmentTree
from quotas.models import AskRule

HIGHEST = 100


def priority_most(tree: DepartmentTree, department_id: int) -> int:
    """The highest priority that people of a department may ask: the nearest rule upwards, else 100."""
    path = tree.ancestors(department_id)
    rules = dict(AskRule.objects.filter(department_id__in=path).values_list("department_id", "priority_most"))
    return next((rules[pk] for pk in reversed(path) if pk in rules), HIGHEST)
