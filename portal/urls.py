"""All addresses of the installation. Rooms choose their own full paths."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from drf_spectacular.views import SpectacularAPIView

from portal.accounts.web.views import set_language
from portal.api_v1 import urlpatterns as api_v1
from portal.web import views
from portal.web.api_docs import api_docs

handler400 = "portal.web.views.bad_request"
handler403 = "portal.web.views.forbidden"
handler404 = "portal.web.views.not_found"
handler500 = "portal.web.views.server_error"

urlpatterns = [
    path("", views.home, name="home"),
    path("healthz", views.healthz, name="healthz"),
    path("readyz", views.readyz, name="readyz"),
    path("help/", views.help_page, name="help"),
    path("design/", views.design, name="design"),
    path("i18n/setlang/", set_language, name="set_language"),
    path("", include("portal.accounts.urls")),
    path("", include("portal.notify.urls")),
    path("", include("portal.ops.urls")),
    path("", include("quotas.urls")),
    path("", include("pool.urls")),
    path("", include("monitoring.urls")),
    path("api/v1/", include((api_v1, "api"), namespace="v1")),
    path("api/schema/", SpectacularAPIView.as_view(api_version="v1"), name="api-schema"),
    path("api/docs/", api_docs, name="api-docs"),
    path("admin/", admin.site.urls),
]
