"""The steps of the ladder as the lease page shows them, at each step of a case."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pool.models import ReclaimCase
from pool.web.ladder_words import ladder_steps

T = datetime(2026, 6, 16, 6, 0, tzinfo=UTC)


def shown(**values: Any) -> list[tuple[str, str]]:
    """(title, state) of each step of a case."""
    known = {"noticed_at": T, "grace_until": T + timedelta(minutes=10), **values}
    return [(str(row["title"]), str(row["s"])) for row in ladder_steps(ReclaimCase(cause="idle", **known))]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"step": "notice"}, [("Notice", "now"), ("Stop", "todo"), ("Seen free", "todo")]),
        (
            {"step": "notice", "hook": "command", "hook_at": T},
            [("Notice", "now"), ("Checkpoint", "todo"), ("Stop", "todo"), ("Seen free", "todo")],
        ),
        (
            {"step": "checkpoint", "hook": "command", "checkpoint_at": T},
            [("Notice", "done"), ("Checkpoint", "now"), ("Stop", "todo"), ("Seen free", "todo")],
        ),
        (
            {"step": "stopping", "hook": "url", "checkpoint_at": T, "checkpoint_result": {"all": {"ok": False}}},
            [("Notice", "done"), ("Checkpoint", "bad"), ("Stop", "now"), ("Seen free", "todo")],
        ),
        (
            {"step": "stopping", "stop_sent_at": T, "stopped_at": T},
            [("Notice", "done"), ("Stop", "done"), ("Seen free", "now")],
        ),
        (
            {"step": "freed", "stopped_at": T, "seen_free_at": T},
            [("Notice", "done"), ("Stop", "done"), ("Seen free", "done")],
        ),
        ({"step": "fenced", "stopped_at": T}, [("Notice", "done"), ("Stop", "done"), ("Seen free", "bad")]),
        ({"step": "withdrawn", "closed_at": T, "hook": "url"}, [("Notice", "done"), ("Withdrawn", "done")]),
        (
            {"step": "withdrawn", "closed_at": T, "hook": "url", "checkpoint_at": T},
            [("Notice", "done"), ("Checkpoint", "done"), ("Withdrawn", "done")],
        ),
    ],
)  # fmt: skip
def test_what_is_done_what_is_now_and_what_is_to_come(
    values: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert shown(**values) == expected
