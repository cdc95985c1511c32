"""Role bindings and tokens as lists."""

from __future__ import annotations

from django.db.models import Q, QuerySet

from portal.accounts.models import ApiToken, RoleBinding
from portal.accounts.policy import Policy
from portal.accounts.selectors.people import sees_people
from portal.kernel.clock import now

ROLE_STATES = ("valid", "future", "ended", "all")
TOKEN_STATES = ("valid", "over", "all")


def bindings_visible(policy: Policy) -> QuerySet[RoleBinding]:
    """Bindings within the departments that `policy` sees, and the own ones."""
    scope = sees_people(policy)
    rows = RoleBinding.objects.select_related("user", "department")
    if scope.everything:
        return rows
    return rows.filter(Q(user=policy.user) | Q(department_id__in=scope.ids))


def bindings_list(
    policy: Policy, *, role: str = "", state: str = "valid", department_id: int | None = None
) -> QuerySet[RoleBinding]:
    """Filtered by role, by time (`ROLE_STATES`) and by a department's subtree; ordered by role and person."""
    rows, moment = bindings_visible(policy), now()
    if role:
        rows = rows.filter(role=role)
    if department_id is not None:
        rows = rows.filter(department_id__in=policy.tree.subtree(department_id))
    over = Q(valid_to__isnull=False, valid_to__lte=moment)
    if state == "valid":
        rows = rows.exclude(over).filter(valid_from__lte=moment)
    elif state == "future":
        rows = rows.filter(valid_from__gt=moment)
    elif state == "ended":
        rows = rows.filter(over)
    return rows.order_by("role", "user__display_name", "id")


def tokens_visible(policy: Policy) -> QuerySet[ApiToken]:
    """Own tokens; all for those who administer people or audit."""
    rows = ApiToken.objects.select_related("user")
    if policy.administers_people or policy.audits:
        return rows
    return rows.filter(user=policy.user)


def tokens_in_state(rows: QuerySet[ApiToken], state: str) -> QuerySet[ApiToken]:
    """Filtered by time (`TOKEN_STATES`), newest first."""
    live = Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=now()))
    if state == "valid":
        rows = rows.filter(live)
    elif state == "over":
        rows = rows.exclude(live)
    return rows.order_by("-id")
