"""The API root: collects what each room exposes (`<room>/api/urls.py`)."""

from __future__ import annotations

from django.urls import include, path
from rest_framework.routers import SimpleRouter

import monitoring.api.urls
import pool.api.urls
import portal.accounts.api.urls
import portal.notify.api.urls
import portal.ops.api.urls
import quotas.api.urls

_rooms = [
    portal.accounts.api.urls,
    portal.notify.api.urls,
    portal.ops.api.urls,
    quotas.api.urls,
    pool.api.urls,
    monitoring.api.urls,
]
_router = SimpleRouter()
for _room in _rooms:
    for _prefix, _viewset, _basename in _room.router_entries:
        _router.register(_prefix, _viewset, basename=_basename)

urlpatterns = [path("", include(_router.urls))]
for _room in _rooms:
    urlpatterns += _room.urlpatterns_v1
