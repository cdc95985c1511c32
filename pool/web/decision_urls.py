"""Addresses of the pages about decisions and the policy."""

from __future__ import annotations

from django.urls import path

from pool.web import views_decisions

urlpatterns = [
    path("scheduler/decisions/", views_decisions.decision_list, name="decisions"),
    path("scheduler/decisions/<uuid:uid>/", views_decisions.decision, name="decision"),
    path("scheduler/decisions/<uuid:uid>/replay/", views_decisions.decision_again, name="decision-replay"),
    path("scheduler/policy/", views_decisions.policy_list, name="policies"),
    path("scheduler/policy/new/", views_decisions.policy_new, name="policy-new"),
    path("scheduler/policy/<uuid:uid>/", views_decisions.policy_detail, name="policy"),
    path("scheduler/policy/<uuid:uid>/preview/", views_decisions.policy_preview_part, name="policy-preview"),
    path("scheduler/policy/<uuid:uid>/do/<slug:act>/", views_decisions.policy_act, name="policy-act"),
]
