"""Addresses of the pages about taking back and maintenance."""

from __future__ import annotations

from django.urls import path

from pool.web import views_maintenance, views_reclaim

urlpatterns = [
    path("reclaim/", views_reclaim.cases, name="reclaim"),
    path("reclaim/modes/", views_reclaim.modes, name="reclaim-modes"),
    path("reclaim/advice/", views_reclaim.advice, name="reclaim-advice"),
    path("reclaim/surplus/", views_reclaim.surplus, name="reclaim-surplus"),
    path("reclaim/rules/", views_reclaim.rules, name="reclaim-rules"),
    path("maintenance/", views_maintenance.window_list, name="maintenance"),
    path("maintenance/new/", views_maintenance.window_new, name="maintenance-new"),
    path("maintenance/<uuid:uid>/", views_maintenance.window_detail, name="maintenance-window"),
    path("maintenance/<uuid:uid>/cancel/", views_maintenance.window_act, name="maintenance-cancel"),
]
