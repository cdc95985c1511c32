"""What this room exposes under /api/v1/."""

from __future__ import annotations

from typing import Any

from quotas.api import money_urls

router_entries: list[tuple[str, Any, str]] = [*money_urls.router_entries]
urlpatterns_v1: list[Any] = [*money_urls.urlpatterns_v1]
