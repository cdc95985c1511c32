"""API of budgets: integers, as on the page."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from portal.accounts.api.base import ApiViewSet
from portal.accounts.models import Department, Role
from portal.kernel.clock import now
from portal.kernel.errors import Invalid
from quotas.models import Budget
from quotas.selectors.billing_time import month_of
from quotas.selectors.budgets import BudgetState, budget_states, seen_budgets
from quotas.services.budgets import budget_end, budget_for, budget_set


class BudgetInput(serializers.Serializer[Any]):
    """What sets a budget. `starts_on` is the first day of a month."""

    department = serializers.CharField(help_text="code")
    period = serializers.ChoiceField(choices=Budget.Period.choices)
    starts_on = serializers.DateField()
    amount_micro = serializers.IntegerField(required=False, allow_null=True, default=None)
    gpu_ms = serializers.IntegerField(required=False, allow_null=True, default=None)
    stops = serializers.BooleanField(required=False, default=False)
    note = serializers.CharField(max_length=300)


def budget_json(state: BudgetState) -> dict[str, Any]:
    """A budget with what is used of it."""
    budget = state.budget
    return {
        "uid": str(budget.uid),
        "department": budget.department.code,
        "path": state.path,
        "period": budget.period,
        "starts_on": budget.starts_on,
        "ends_on": budget.ends_on,
        "stops": budget.stops,
        "until": state.until,
        "measures": [
            {
                "measure": m.name,
                "limit": m.limit,
                "used": m.used,
                "percent": m.percent,
                "forecast": m.forecast.total if m.forecast else None,
                "forecast_days": m.forecast.days if m.forecast else None,
            }
            for m in state.measures
        ],
    }


@extend_schema(tags=["money"])
class BudgetViewSet(ApiViewSet):
    """Budgets in force of departments whose money the caller sees."""

    queryset = Budget.objects.none()
    serializer_class = BudgetInput
    pagination_class = None
    lookup_field = "uid"

    @extend_schema(operation_id="budgets_list", responses={200: dict})
    def list(self, request: Request) -> Response:
        """All in force now."""
        self.policy.require(self.policy.has(Role.FINANCE, Role.AUDITOR, Role.POOL_ADMIN, Role.LEAD))
        states = budget_states(list(seen_budgets(self.policy, month_of(now()))), self.policy.tree)
        return Response({"count": len(states), "results": [budget_json(state) for state in states]})

    @extend_schema(request=BudgetInput, responses={201: dict})
    def create(self, request: Request) -> Response:
        """Set a budget; the one of the same department and period ends."""
        self.policy.require(self.policy.keeps_books)
        given = BudgetInput(data=request.data)
        given.is_valid(raise_exception=True)
        data = dict(given.validated_data)
        department = Department.objects.without_tree_fields().filter(code=data.pop("department")).first()
        if department is None:
            raise Invalid.field("department", _("There is no department of this code."))
        budget = budget_set(acting_user=self.actor, department=department, **data)
        (state,) = budget_states([budget], self.policy.tree)
        return Response(budget_json(state), status=status.HTTP_201_CREATED)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, uid: str) -> Response:
        """Take a budget back."""
        self.policy.require(self.policy.keeps_books)
        budget_end(acting_user=self.actor, budget=budget_for(UUID(uid)))
        return Response(status=status.HTTP_204_NO_CONTENT)
