"""Pages of this room."""

from __future__ import annotations

from typing import Any

from quotas.web.money.urls import urlpatterns as money_urlpatterns

app_name = "quotas"
urlpatterns: list[Any] = [*money_urlpatterns]
