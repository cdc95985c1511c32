"""Pages of this room."""

from __future__ import annotations

from typing import Any

app_name = "monitoring"
urlpatterns: list[Any] = []
