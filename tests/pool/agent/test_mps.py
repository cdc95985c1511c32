"""Fractions as limits: a daemon for the cards and the account while work needs it, and what goes over its caps."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pool.agent import files, mps, procs
from pool.agent.jobs import Jobs
from pool.agent.outbox import Outbox
from tests.pool.agent.conftest import ROOT, kill_jobs, wait_for

FIRST = "01a22e77-76a8-79e1-84ec-88011de29caf"
SECOND = "01a22e77-76a8-79e1-84ec-88011de29cb0"
ACCOUNT = "nobody" if os.geteuid() == 0 else None


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Jobs of a node that has the control program."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.name.startswith(("pytest-of-", "pytest-", "popen-", "test_")):
            os.chmod(folder, 0o755)
    monkeypatch.setenv("GPUPOOL_MPS_CONTROL", str(ROOT / "tests/native/nvidia-cuda-mps-control"))
    made = jobs_of(tmp_path)
    yield made
    kill_jobs(tmp_path / "state")
    made.daemons.sweep([])


def jobs_of(tmp_path: Path) -> Jobs:
    state = tmp_path / "state"
    for name in ("state", "state/jobs", "work"):
        os.makedirs(tmp_path / name, exist_ok=True)
    os.chmod(tmp_path / "work", 0o711)
    return Jobs(str(state), str(tmp_path / "work"), Outbox(str(state / "outbox"), 1 << 20), ACCOUNT)


def fraction(command: str = "sleep 60", milli: int = 300, mib: int = 24_576, **more: Any) -> dict[str, Any]:
    return {
        "command": command, "gpu_uuids": ["GPU-0"], "charge_milli": milli, "gpu_mem_limit_mib": mib, "user": "lin",
        **more,
    }  # fmt: skip


def running(jobs: Jobs, allocation: str, spec: dict[str, Any]) -> Any:
    job = jobs.start(allocation, 0, spec)
    assert job is not None, list(jobs.outbox.vital.messages())

    def runs() -> bool:
        jobs.poll()
        return job.run is not None

    wait_for(runs)
    return job


def ended(jobs: Jobs, job: Any) -> None:
    def over() -> bool:
        jobs.poll()
        return bool(job.finished)

    wait_for(over)


def said(jobs: Jobs, key: str) -> list[str]:
    return Path(jobs.daemons.folder(key), "log", "control.log").read_text().splitlines()


def test_a_fraction_gets_a_daemon_of_its_account_with_its_limits_and_it_ends_with_the_work(
    node: Jobs,
) -> None:
    job = running(node, FIRST, fraction())
    key = job.meta["mps"]
    pid = node.daemons.pid(key)
    assert pid is not None
    uid = os.stat(f"/proc/{pid}").st_uid
    assert uid == job.meta["account_ids"]["uid"] and (uid != 0 or os.geteuid() != 0)
    assert said(node, key) == [
        f"start GPU-0 uid {uid}",
        "set_default_active_thread_percentage 30",
        "set_default_device_pinned_mem_limit 0 24576M",
    ]
    env = files.read_json(job.path("job.json"))["env"]
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=24576M"
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == os.path.join(node.daemons.folder(key), "pipe")
    assert node.owner_of(next(iter(procs.descendants(pid)))) is job  # its server is no stranger on the card
    node.stop(FIRST, 0, "SIGTERM", 5)
    ended(node, job)
    assert not procs.alive(pid, None) and not os.path.exists(node.daemons.folder(key))


def test_work_that_shares_a_daemon_raises_and_lowers_its_caps_and_the_last_one_ends_it(node: Jobs) -> None:
    one = running(node, FIRST, fraction())
    two = running(node, SECOND, fraction(milli=500, mib=40_960))
    key = one.meta["mps"]
    assert two.meta["mps"] == key
    assert said(node, key)[-2:] == [
        "set_default_active_thread_percentage 50",
        "set_default_device_pinned_mem_limit 0 40960M",
    ]
    node.stop(SECOND, 0, "SIGTERM", 5)
    ended(node, two)
    assert said(node, key)[-2:] == [
        "set_default_active_thread_percentage 30",
        "set_default_device_pinned_mem_limit 0 24576M",
    ]
    assert node.daemons.pid(key) is not None
    node.stop(FIRST, 0, "SIGTERM", 5)
    ended(node, one)
    assert node.daemons.pid(key) is None


def test_the_next_agent_ends_a_daemon_that_nobody_needs_and_keeps_one_that_is_used(
    node: Jobs, tmp_path: Path
) -> None:
    job = running(node, FIRST, fraction())
    key = job.meta["mps"]
    again = jobs_of(tmp_path)
    again.adopt()
    assert again.daemons.pid(key) == node.daemons.pid(key) is not None
    os.kill(
        job.run["shim_pid"], 15
    )  # no order: the shim alone ends it, as a stop from before the restart would
    wait_for(lambda: os.path.exists(job.path("exit.json")))
    third = jobs_of(tmp_path)
    third.adopt()
    assert third.daemons.pid(key) is None


def test_a_daemon_that_does_not_start_refuses_the_work_and_leaves_nothing(
    node: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "control"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("GPUPOOL_MPS_CONTROL", str(program))
    monkeypatch.setattr(mps, "SECONDS", 0.2)
    assert node.start(FIRST, 0, fraction()) is None
    told = [m for m in node.outbox.vital.messages() if m["t"] == "job"]
    assert [(m["state"], m["error"]["code"], m["error"]["retryable"]) for m in told] == [
        ("failed_start", "mps_not_started", True)
    ]
    assert os.listdir(node.root) == []


def test_whole_cards_and_slices_get_none_and_a_node_without_the_program_watches_only(
    node: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not mps.wanted(fraction(milli=1000)) and not mps.wanted(fraction(mig_uuids=["MIG-1"]))
    monkeypatch.setenv("GPUPOOL_MPS_CONTROL", "no-such-program")
    assert mps.capability() == {"ok": False, "reason": "no_mps_control"}
    job = running(node, FIRST, fraction())
    assert job.meta["mps"] is None and job.meta["gpu_mem_limit_mib"] == 24_576
    node.stop(FIRST, 0, "SIGTERM", 5)
    ended(node, job)


def row(mib: int, allocation: str = FIRST) -> list[Any]:
    process = {"pid": 1, "name": "python", "user": "lin", "mem_mib": mib, "allocation": allocation}
    return ["GPU-0", None, "t", {}, {}, [process]]


def test_memory_over_the_share_is_told_once_and_ended_by_policy(
    node: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUPOOL_MPS_CONTROL", "no-such-program")
    job = running(node, FIRST, fraction(mib=10_000, over_share="stop"))
    assert node.judge_shares([row(10_264)]) == []  # 2 % and 64 MiB are left to contexts
    assert node.judge_shares([row(90_000, SECOND)]) == []  # somebody else's
    assert node.judge_shares([row(10_265)]) == [(job, {"GPU-0": 10_265}, True)]
    assert node.judge_shares([row(9_000)]) == [] and not os.path.exists(job.path("stop.json"))
    assert node.judge_shares([row(20_000)])[0][2] is True
    assert node.judge_shares([row(20_000)])[0][2] is False
    ended(node, job)
    assert job.exit["error"] == {
        "code": "over_share",
        "detail": "GPU-0: 20000 MiB of 10000",
        "retryable": False,
    }


def test_memory_over_the_share_is_only_told_where_the_policy_says_notice(
    node: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUPOOL_MPS_CONTROL", "no-such-program")
    job = running(node, FIRST, fraction(mib=10_000))
    for first in (True, False, False):
        assert node.judge_shares([row(20_000)])[0][2] is first
    time.sleep(0.05)
    node.poll()
    assert job.exit is None
    node.stop(FIRST, 0, "SIGTERM", 5)
    ended(node, job)


def test_what_a_person_sets_never_decides_devices_or_limits(node: Jobs) -> None:
    wanted = {
        "CUDA_VISIBLE_DEVICES": "all", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "LD_PRELOAD": "/tmp/x.so",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=80G", "CUDA_MPS_PIPE_DIRECTORY": "/tmp", "GPUPOOL_JOB": "other/0",
        "NVIDIA_VISIBLE_DEVICES": "all", "MINE": "kept",
    }  # fmt: skip
    job = running(node, FIRST, fraction(env=wanted))
    env = files.read_json(job.path("job.json"))["env"]
    assert env["MINE"] == "kept" and env["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30" and env["GPUPOOL_JOB"] == f"{FIRST}/0"
    assert "LD_PRELOAD" not in env and "NVIDIA_VISIBLE_DEVICES" not in env
    assert env["CUDA_MPS_PIPE_DIRECTORY"].startswith(node.daemons.root)
    node.stop(FIRST, 0, "SIGTERM", 5)
    ended(node, job)
