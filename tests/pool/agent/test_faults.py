"""What a node does wrong while work is on it, without a network: dead processes that stay, a disk without room."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from pool.agent import procs
from pool.agent.jobs import Jobs
from pool.agent.outbox import Outbox
from tests.pool.agent.conftest import wait_for

ALLOCATION = "01a22e77-76a8-79e1-84ec-88011de29caf"


def test_a_zombie_is_no_work_that_runs() -> None:
    """Its parent has not asked for it yet: it is still in the list, and holds neither a card nor a stop."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        ticks = procs.start_ticks(pid)
        wait_for(lambda: (procs.stat(pid) or ("",))[0] == "Z")
        assert not procs.alive(pid, ticks) and not procs.alive(pid, None)
    finally:
        os.waitpid(pid, 0)
    assert not procs.alive(pid, ticks)


def test_a_number_that_another_process_has_now_is_not_that_process() -> None:
    ticks = procs.start_ticks(os.getpid())
    assert ticks is not None and procs.alive(os.getpid(), ticks)
    assert not procs.alive(os.getpid(), ticks - 1)


def test_a_start_on_a_full_disk_is_told_and_tried_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("state", "state/jobs", "work"):
        os.makedirs(tmp_path / name, exist_ok=True)
    jobs = Jobs(str(tmp_path / "state"), str(tmp_path / "work"), Outbox(str(tmp_path / "outbox")))

    def full(*_words: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "work")

    monkeypatch.setattr(jobs, "_make", full)
    assert jobs.start(ALLOCATION, 0, {"command": "true"}) is None
    (told,) = [message for message in jobs.outbox.vital.messages() if message["t"] == "job"]
    assert (told["state"], told["error"]["code"], told["error"]["retryable"]) == (
        "failed_start",
        "node_storage",
        True,
    )
    assert "No space left" in told["error"]["detail"] and (ALLOCATION, 0) not in jobs.jobs
