"""API of prices and ledger."""

from __future__ import annotations

from typing import Any

router_entries: list[tuple[str, Any, str]] = []
urlpatterns_v1: list[Any] = []
