"""Pages of this room."""

from __future__ import annotations

from typing import Any

from django.urls import path

from portal.notify.web import views

app_name = "notify"
urlpatterns: list[Any] = [
    path("notices/", views.notices, name="list"),
    path("notices/read-all/", views.read_all, name="read_all"),
    path("notices/preferences/", views.preferences, name="preferences"),
    path("notices/webhooks/", views.webhooks, name="webhooks"),
    path("notices/webhooks/<uuid:uid>/", views.webhook, name="webhook"),
    path("notices/webhooks/<uuid:uid>/test/", views.webhook_try, name="webhook_test"),
    path("notices/<uuid:uid>/open/", views.notice_open, name="open"),
]
