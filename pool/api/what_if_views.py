"""API of what-if: what would happen if this were asked. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from pool.selectors.what_if import Near, WhatIf, what_if
from pool.web.reasons import explain
from portal.accounts.api.base import ApiViewSet
from quotas.api.request_views import CONTROL, body, option_json
from quotas.api.serializers import RequestInput
from quotas.models import CapacityRequest
from quotas.selectors.flavours import flavours_on_offer
from quotas.services.asking import read_request
from quotas.services.judging import at_once_of, gpu_ms_of, review_length, verdict_of


class WhatIfAnswer(serializers.Serializer[Any]):
    """The answer. Amounts are milli-GPU, GPU-milliseconds and micro currency; times UTC."""

    outcome = serializers.CharField(allow_null=True, help_text="auto, steps or refused")
    rules = serializers.ListField(child=serializers.CharField())
    steps = serializers.ListField(child=serializers.DictField())
    options = serializers.ListField(child=serializers.DictField(), help_text="each flavour: quota and cost")
    at_once = serializers.IntegerField(help_text="members that hold GPUs at once")
    gpu_ms = serializers.IntegerField(allow_null=True)
    cost_micro = serializers.IntegerField(allow_null=True, help_text="at most, of the dearest flavour")
    starts_now = serializers.BooleanField()
    nodes = serializers.ListField(child=serializers.CharField())
    reason = serializers.DictField(allow_null=True, help_text="code, headline, figures: why it would wait")
    start = serializers.DictField(allow_null=True, help_text="from, to, basis, position, of")
    deadline = serializers.DictField(
        allow_null=True, help_text="verdict met, maybe, missed, unknown; ends_by"
    )
    sooner = serializers.ListField(
        child=serializers.DictField(), help_text="near wishes that would start now, with their changes"
    )


class WhatIfViewSet(ApiViewSet):
    """What would happen if this were asked."""

    queryset = CapacityRequest.objects.none()
    serializer_class = WhatIfAnswer
    token_scope = "read"

    @extend_schema(request=RequestInput, responses={200: WhatIfAnswer})
    def create(self, request: Request) -> Response:
        """Judge wishes as the form does: may they pass by themselves, what is left of the quota, would they start
        now, and if not why, about when, and what would start sooner; what they cost. Nothing is written.
        """
        values = {name: value for name, value in body(request).items() if name not in CONTROL}
        cleaned = read_request(values, user=self.policy.user, policy=self.policy, draft=True)
        verdict = verdict_of(cleaned, policy=self.policy)
        names = {pk: row.name for pk, row in self.policy.tree.rows.items()}
        answer = what_if(cleaned, user_id=self.policy.user.pk, offered=list(flavours_on_offer()))
        best, plan, dearest = verdict.best, verdict.plan, verdict.dearest
        length = review_length(cleaned)
        return Response(
            {
                "outcome": plan.outcome if plan is not None else None,
                "rules": list(plan.matched) if plan is not None else [],
                "steps": [
                    {"role": step.role, "timeout_hours": step.timeout_hours, "rule": step.rule}
                    for step in (plan.steps if plan is not None else ())
                ],
                "options": [option_json(option, names) for option in verdict.options],
                "at_once": at_once_of(cleaned),
                "gpu_ms": gpu_ms_of(best, cleaned, length) if best is not None else None,
                "cost_micro": dearest.cost_micro if dearest is not None else None,
                **_start(answer),
                "deadline": {"verdict": answer.deadline, "ends_by": answer.ends_by}
                if answer.deadline
                else None,
                "sooner": [_near(one) for one in answer.near],
            }
        )


def _start(answer: WhatIf) -> dict[str, Any]:
    fit = answer.fit
    why: Mapping[str, Any] | None = None
    if fit.reason:
        headline = explain(fit.reason, fit.figures).headline
        why = {"code": fit.reason, "headline": headline, "figures": fit.figures}
    start = None
    if fit.start_from is not None:
        start = {
            "from": fit.start_from,
            "to": fit.start_to,
            "basis": fit.basis,
            "position": fit.position,
            "of": fit.of,
        }
    elif answer.history is not None:
        waits = answer.history
        start = {
            "wait_s_from": waits.low_s,
            "wait_s_to": waits.high_s,
            "basis": "history",
            "cases": waits.count,
        }
    return {"starts_now": fit.starts_now, "nodes": list(fit.nodes), "reason": why, "start": start}


def _near(near: Near) -> dict[str, Any]:
    return {
        "kind": near.kind,
        "changes": dict(near.changes),
        "flavour": near.flavour.code,
        "cost_micro": near.cost_micro,
    }
