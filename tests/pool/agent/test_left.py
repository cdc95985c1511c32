"""What stays behind: processes on the cards of a hold that is over, and folders that grow or are forgotten."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from pool.agent import procs, workspace
from pool.agent.accounts import Account
from pool.agent.jobs import KEEP_WORK_SECONDS, Jobs
from pool.agent.outbox import Outbox
from tests.parts import missing
from tests.pool.agent.conftest import wait_for

FIRST = "01a22e77-76a8-79e1-84ec-88011de29caf"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root ends other accounts' processes")
HOLDER = 61001


def jobs_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    for name in ("state/jobs", "work"):
        os.makedirs(tmp_path / name, exist_ok=True)
    account = Account("holder", HOLDER, HOLDER, "/", "/bin/sh", True)
    monkeypatch.setattr("pool.agent.accounts.resolve", lambda *_args: account)
    return Jobs(str(tmp_path / "state"), str(tmp_path / "work"), Outbox(str(tmp_path / "outbox"), 1 << 20))


def sleeper(uid: int, script: str = "sleep 60") -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/sh", "-c", script], user=uid, group=uid, extra_groups=[], cwd="/")


def seen(*processes: subprocess.Popen[bytes]) -> dict[str, dict[str, Any]]:
    left = [{"pid": one.pid, "name": "sh", "user": "x", "mem_mib": 1} for one in processes]
    return {"GPU-0": {"free": False, "reason": "processes", "procs": left}}


@as_root
def test_after_a_hold_its_persons_processes_are_ended_by_policy_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(tmp_path, monkeypatch)
    spec = {"hold": True, "gpu_uuids": ["GPU-0"], "charge_milli": 1000, "user": "lin", "left": "stop"}
    job = jobs._make(FIRST, 0, spec)
    jobs.jobs[(FIRST, 0)] = job
    stubborn = sleeper(HOLDER, "trap '' TERM; while :; do sleep 1; done")
    other = sleeper(HOLDER + 1)
    try:
        wait_for(lambda: procs.owner(stubborn.pid) == HOLDER and procs.owner(other.pid) == HOLDER + 1)
        time.sleep(0.2)  # the trap is set
        assert jobs.end_left(job, seen(stubborn, other)) == []  # the hold is not over
        job.give_up("exited", None, "", False)
        assert jobs.end_left(job, seen(stubborn, other)) == [stubborn.pid]
        assert stubborn.poll() is None
        assert jobs.end_left(job, seen(stubborn, other)) == [stubborn.pid]
        assert stubborn.wait(10) == -9 and other.poll() is None
    finally:
        for one in (stubborn, other):
            one.kill()
            one.wait()


@as_root
def test_where_the_policy_only_names_them_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(tmp_path, monkeypatch)
    job = jobs._make(FIRST, 0, {"hold": True, "gpu_uuids": ["GPU-0"], "charge_milli": 1000})
    job.give_up("exited", None, "", False)
    mine = sleeper(HOLDER)
    try:
        assert jobs.end_left(job, seen(mine)) == [] and mine.poll() is None
    finally:
        mine.kill()
        mine.wait()


def test_a_folder_is_counted_without_following_links_and_names_once(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/one").write_bytes(os.urandom(3 << 20))
    os.link(tmp_path / "a/b/one", tmp_path / "a/again")
    (tmp_path / "a/link").symlink_to("/usr")
    assert 3 <= workspace.size_mib(str(tmp_path)) <= 4
    assert workspace.size_mib(str(tmp_path), 1) > 1
    assert workspace.size_mib(str(tmp_path / "nowhere")) == 0


def test_a_work_folder_goes_a_month_after_its_last_use_and_a_used_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        missing("only root gives folders to others")
    jobs = jobs_of(tmp_path, monkeypatch)
    jobs.jobs[(FIRST, 0)] = jobs._make(FIRST, 0, {"hold": True, "workdir_name": "used"})
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    for name in ("old", "new"):
        (tmp_path / "work" / name).mkdir()
    (tmp_path / "work/old/link").symlink_to(outside)
    past = time.time() - KEEP_WORK_SECONDS - 60
    for name in ("old", "used"):
        os.utime(tmp_path / "work" / name, (past, past))
    jobs.forget_old()
    assert sorted(os.listdir(tmp_path / "work")) == ["new", "used"]
    assert (outside / "kept").read_text() == "kept"
