"""A month in words."""

from __future__ import annotations

from datetime import date

from django.utils import formats, translation


def month_name(month: date) -> str:
    """``June 2026`` / ``2026年6月``."""
    if (translation.get_language() or "").startswith("zh"):
        return f"{month.year}年{month.month}月"
    return formats.date_format(month, "F Y")
