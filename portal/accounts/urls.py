"""Pages of this room."""

from __future__ import annotations

from typing import Any

from django.urls import path

from portal.accounts.web import views

app_name = "accounts"
urlpatterns: list[Any] = [
    path("accounts/login/", views.sign_in, name="login"),
    path("accounts/logout/", views.sign_out, name="logout"),
    path("accounts/password/", views.change_password, name="password_change"),
    path("accounts/profile/", views.profile, name="profile"),
    path("accounts/theme/", views.theme, name="theme"),
]
