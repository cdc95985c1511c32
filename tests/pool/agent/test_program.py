"""The one file: what is in it, on which Python it runs, how a job's own process behaves."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pool.agent import accounts, build, environment, files, kmsg, shim
from pool.client import build as client_build
from tests.pool.agent.conftest import ROOT, clean_environment, python38, wait_for

# Newer than Python 3.8, and easy to write by habit.
TOO_NEW = {
    "UTC", "removeprefix", "removesuffix", "cache", "pidfd_open", "waitstatus_to_exitcode", "batched", "pairwise",
    "is_relative_to", "StrEnum", "file_digest", "process_cpu_count", "getLevelNamesMapping",
}  # fmt: skip
ASYNCIO_TOO_NEW = {"to_thread", "timeout", "TaskGroup", "Runner", "Barrier"}
NEW_MODULES = {"tomllib", "zoneinfo", "graphlib"}


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pyz") / "agent.pyz"
    file.write_bytes(build.build())
    return file


INSIDE = {**build.members(), **client_build.members()}


@pytest.mark.parametrize("name", sorted(name for name in INSIDE if name.endswith(".py")))
def test_every_file_is_python_38(name: str) -> None:
    tree = ast.parse(INSIDE[name], feature_version=(3, 8))
    if not name.startswith("pool/"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert node.attr not in TOO_NEW, f"{name}: .{node.attr}"
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            assert not (owner == "asyncio" and node.attr in ASYNCIO_TOO_NEW), f"{name}: asyncio.{node.attr}"
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names | {"pool", "pynvml"} and top not in NEW_MODULES, module
            own = ("pool.agent", "pool.client") if name.startswith("pool/client") else ("pool.agent",)
            assert top != "pool" or module.startswith(own), f"{name} imports {module}"
        keywords = [k.arg for k in node.keywords] if isinstance(node, ast.Call) else []
        assert not ("strict" in keywords and getattr(getattr(node, "func", None), "id", "") == "zip"), name
    assert "from __future__ import annotations" in INSIDE[name].decode() or name.endswith(
        ("__init__.py", "__main__.py")
    )


def test_the_same_source_gives_the_same_bytes(pyz: Path) -> None:
    assert build.build() == pyz.read_bytes()
    assert pyz.read_bytes().startswith(b"#!/usr/bin/env python3\n")


def test_it_runs_on_a_real_python_38_without_site_packages(pyz: Path, tmp_path: Path, nvml) -> None:
    python = python38()
    if python is None:
        pytest.skip("no Python 3.8 here")
    run = [python, "-I", "-S", str(pyz), "--state", str(tmp_path / "s")]
    assert subprocess.run([*run, "version"], capture_output=True, text=True, check=True).stdout == "0.1.0\n"
    unit = subprocess.run([*run, "systemd-unit"], capture_output=True, text=True, check=True).stdout
    assert f"ExecStart={python} {pyz} --state {tmp_path / 's'} run" in unit and "KillMode=process" in unit
    answer = subprocess.run(
        [python, "-I", "-S", str(pyz), "_collect"],
        input="inventory\nsample\n",
        capture_output=True,
        text=True,
        check=True,
        env=clean_environment(nvml.environment),
    ).stdout.splitlines()
    assert [card["uuid"] for card in json.loads(answer[0])["gpus"]] == ["GPU-test-0", "GPU-test-1"]
    assert len(json.loads(answer[1])["rows"]) == 2
    job = make_job(tmp_path / "job", ["/bin/sh", "-c", "echo 三点八; exit 7"])
    subprocess.run([python, "-I", "-S", str(pyz), "_shim", str(job)], check=True)
    assert files.read_json(str(job / "exit.json"))["exit_code"] == 7
    assert (job / "output.log").read_text() == "三点八\n"
    assert subprocess.run([*run, "run"], capture_output=True, text=True, check=False).returncode == 1


def test_a_machine_without_a_driver_says_so() -> None:
    command = [sys.executable, "-m", "pool.agent", "_collect"]
    done = subprocess.run(command, input="inventory\n", capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout) == {"ok": False, "reason": "no_driver"}


def make_job(folder: Path, argv: list[str], **more: object) -> Path:
    folder.mkdir(parents=True)
    me = accounts.Account("me", os.getuid(), os.getgid(), "/", "/bin/sh", False)
    order = {"argv": argv, "hold": False, "env": environment.build({}, me, "a", 0, str(folder))}
    order.update(account={"name": "me", "uid": 0, "gid": 0, "switch": False}, cwd=str(folder))
    files.write_json(str(folder / "job.json"), order | more)
    return folder


def shim_of(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "pool.agent", "_shim", str(folder)], cwd=ROOT)


def test_the_wall_clock_limit_holds_without_any_agent(tmp_path: Path) -> None:
    job = make_job(tmp_path / "j", ["/bin/sleep", "60"], wall_seconds=1, grace_s=1)
    began = time.monotonic()
    assert shim_of(job).wait(15) == 0
    assert 0.9 < time.monotonic() - began < 8
    ended = files.read_json(str(job / "exit.json"))
    assert ended["error"]["code"] == "wall_limit" and ended["signal"] == signal.SIGTERM


def test_two_shims_for_one_job_start_it_once(tmp_path: Path) -> None:
    job = make_job(tmp_path / "j", ["/bin/sh", "-c", "echo once; sleep 0.5"])
    both = [shim_of(job), shim_of(job)]
    assert sorted(one.wait(15) for one in both) == [0, 3]
    assert (job / "output.log").read_text() == "once\n"
    assert shim_of(job).wait(15) == 3, "a job that ended is not begun again"


def test_a_command_that_does_not_exist_and_a_closed_folder_fail_in_words(tmp_path: Path) -> None:
    job = make_job(tmp_path / "j", ["/no/such/program"])
    shim_of(job).wait(15)
    ended = files.read_json(str(job / "exit.json"))
    assert (ended["state"], ended["error"]["code"]) == ("failed_start", "command_not_found")
    job = make_job(tmp_path / "k", ["/bin/true"], cwd="/no/such/folder")
    shim_of(job).wait(15)
    assert files.read_json(str(job / "exit.json"))["error"]["code"] == "workdir_not_accessible"


def test_what_a_job_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    job = make_job(tmp_path / "j", ["/bin/sh", "-c", "setsid sleep 302 & echo main is done"])
    assert shim_of(job).wait(20) == 0
    wait_for(
        lambda: (
            "sleep 302" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        )
    )


def test_signals_by_name_number_or_nonsense() -> None:
    assert shim.signal_number("SIGUSR1") == signal.SIGUSR1 and shim.signal_number("usr1") == signal.SIGUSR1
    assert shim.signal_number(10) == 10 and shim.signal_number("no") == signal.SIGTERM


def test_environment_of_a_fraction_a_mig_slice_a_gang_and_a_cpu_test() -> None:
    me = accounts.Account("li", 1000, 1000, "/home/li", "/bin/bash", True)

    def made(**spec: object) -> dict[str, str]:
        return environment.build(dict(spec), me, "alloc", 1, "/work")

    whole = made(
        gpu_uuids=["GPU-b", "GPU-a"], charge_milli=2000, env={"CUDA_VISIBLE_DEVICES": "0", "A B": "x"}
    )
    assert whole["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a" and "A B" not in whole
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in whole and whole["HOME"] == "/home/li"
    part = made(gpu_uuids=["GPU-a"], charge_milli=255, gpu_mem_limit_mib=20480)
    assert part["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "26"
    assert part["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M"
    mig = made(gpu_uuids=["GPU-a"], mig_uuids=["MIG-1"], charge_milli=142)
    assert mig["CUDA_VISIBLE_DEVICES"] == "MIG-1" and "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in mig
    gang = made(
        rendezvous={"master_addr": "n1", "master_port": 20001, "node_rank": 1, "nnodes": 2, "nproc": 8}
    )
    assert (gang["MASTER_ADDR"], gang["NODE_RANK"], gang["WORLD_SIZE"], gang["PET_NNODES"]) == (
        "n1",
        "1",
        "16",
        "2",
    )
    assert made()["CUDA_VISIBLE_DEVICES"] == "" and made()["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_accounts_never_end_at_root() -> None:
    with pytest.raises(accounts.AccountError) as refused:
        accounts.resolve("root", euid=0)
    assert refused.value.code == "account_refused"
    with pytest.raises(accounts.AccountError) as missing:
        accounts.resolve("nobody-of-that-name", euid=0)
    assert missing.value.code == "account_missing"
    assert accounts.resolve(None, "nobody", euid=0).name == "nobody"
    assert accounts.resolve("someone", euid=os.getuid() or 12345).switch is False


def test_xid_lines_of_the_kernel_log() -> None:
    line = "6,1234,5678,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    assert kmsg.parse(line) == {
        "bus": "0000:3b:00",
        "xid": 79,
        "pid": None,
        "text": "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    }
    assert kmsg.parse("NVRM: Xid (PCI:0000:C1:00): 31, pid=1234, name=python")["pid"] == 1234
    assert kmsg.parse("usb 1-1: new device") is None
    assert kmsg.bus_key("00000000:3B:00.0") == kmsg.bus_key("0000:3b:00") == (0, 0x3B, 0)
