"""Addresses of the finance pages, in the namespace of quotas."""

from __future__ import annotations

from typing import Any

urlpatterns: list[Any] = []
