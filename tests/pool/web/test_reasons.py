"""Reasons in words: times as everywhere on the pages, in the reader's zone and language."""

from __future__ import annotations

from datetime import UTC, datetime

from django.utils import timezone, translation

from pool.web.reasons import explain
from portal.kernel.clock import set_clock
from portal.kernel.units import to_ms


def test_the_next_release_is_written_as_other_times_are() -> None:
    noon = datetime(2026, 6, 16, 4, 3, tzinfo=UTC)
    figures = {"flavour": "H800", "need": 8, "installed": 16, "next_release_at": to_ms(noon)}
    with set_clock(noon), timezone.override("Asia/Shanghai"):
        for language, label, words in (
            ("en", "Next release", "16\xa0Jun\xa012:03"),
            ("zh-hans", "下一次释放", "6月16日\xa012:03"),
        ):
            with translation.override(language):
                assert dict(explain("no_node_fits", figures).rows)[label] == words
