"""`gpupool run` from a folder to results, on real parts."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from pool.models import Allocation, Gpu, Lease, Node, WorkUpload
from pool.services.conditions import gpu_cordon
from portal.ops.actor import SYSTEM
from quotas.models import CapacityRequest
from tests.pool.agent.conftest import PATIENCE, Site, wait_for
from tests.pool.client.conftest import Laptop, refs

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]

TRAIN = """
import os, sys
print("devices", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
print("asked", open("data/x.txt").read().strip())
os.makedirs("out", exist_ok=True)
open("out/model.bin", "wb").write(b"w" * 100000)
sys.exit(int(sys.argv[1]))
"""


def test_a_folder_runs_on_a_third_of_a_card_and_its_results_come_back(laptop: Laptop, pool: Node) -> None:
    laptop.write("train.py", TRAIN)
    laptop.write("data/x.txt", "forty-two\n")
    laptop.write(".git/config", "secret")
    (laptop.folder / "link").symlink_to("/etc/passwd")
    code, out, err = laptop.call("run", "--gpu", "0.3", "--time", "30m", "--", "python3", "train.py", "3")
    assert code == 3, err
    assert out == "devices GPU-test-0\nasked forty-two\n" or out == "devices GPU-test-1\nasked forty-two\n"
    assert "1 links left out" in err and "brought back 1 files" in err and "exit code 3" in err
    assert (laptop.folder / "out/model.bin").read_bytes() == b"w" * 100000
    request = CapacityRequest.objects.get()
    assert (request.shape, request.fraction_milli, request.command) == ("fraction", 300, "python3 train.py 3")
    wait_for(lambda: not Lease.objects.filter(ended_at=None).exists())
    upload = WorkUpload.objects.get()
    assert upload.files == 2 and request.client_token == upload.client_token


def test_ctrl_c_gives_the_card_back_and_says_so(laptop: Laptop, pool: Node) -> None:
    process = laptop.start("run", "--no-upload", "--", "sh", "-c", "echo ready; sleep 600")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "released" in err
    allocation = Allocation.objects.get()
    assert allocation.end_reason == "released"
    wait_for(lambda: not Lease.objects.filter(ended_at=None).exists())


def test_a_run_outlives_its_terminal_and_is_seen_again(laptop: Laptop, pool: Node) -> None:
    script = "echo one; while [ ! -e go ]; do sleep 0.1; done; echo two; echo kept > result.txt"
    process = laptop.start("run", "--", "sh", "-c", script)
    assert process.stdout is not None and process.stdout.readline() == "one\n"
    process.kill()
    _out, err = process.communicate()
    ref = refs(err)[0]
    laptop.write("go", "")
    assert laptop.call("cp", "go", f"{ref}:.")[0] == 0
    (laptop.folder / "go").unlink()
    code, out, err = laptop.call("attach", ref)
    assert (code, out) == (0, "one\ntwo\n"), err
    assert (laptop.folder / "result.txt").read_text() == "kept\n"
    assert laptop.call("logs", ref)[1] == "one\ntwo\n"


def test_logs_are_followed_over_a_cut_connection_to_the_end(laptop: Laptop, pool: Node, site: Site) -> None:
    script = "n=0; while [ ! -e go ]; do echo line $n; n=$((n+1)); sleep 0.1; done; echo last; exit 3"
    code, _out, err = laptop.call("run", "--detach", "--no-results", "--", "sh", "-c", script)
    assert code == 0, err
    ref = refs(err)[0]
    wait_for(lambda: Allocation.objects.filter(state="running").exists())
    process = laptop.start("logs", ref, "-f")
    assert process.stdout is not None
    heads = [process.stdout.readline() for _ in range(3)]
    site.stop()
    time.sleep(2)
    site.start()
    heads += [process.stdout.readline() for _ in range(30)]
    laptop.write("go", "")
    assert laptop.call("cp", "go", f"{ref}:.")[0] == 0
    assert process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    process.wait(PATIENCE)
    lines = "".join([*heads, out]).splitlines()
    assert (process.returncode, lines[-1]) == (0, "last")
    assert lines[:-1] == [f"line {n}" for n in range(len(lines) - 1)], "each line once, in order"
    assert err.count("connection lost") <= 1, "said once for a cut, however long it is tried"
    again = laptop.call("logs", ref)
    assert again[1].splitlines() == lines, "a later reader sees the same"


def test_what_waits_says_why(laptop: Laptop, pool: Node) -> None:
    for gpu in Gpu.objects.filter(uuid="GPU-test-1"):
        gpu_cordon(acting_user=SYSTEM, gpu=gpu, cordoned=True, reason="one card is enough here")
    code, ref, err = laptop.call("request", "--", "sleep", "600")
    assert code == 0, err
    wait_for(lambda: Allocation.objects.filter(state="running").exists())
    process = laptop.start("run", "--no-upload", "--", "echo", "second")
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(2)]
    assert "asked" in lines[0] and "is in line, position 1 of 1" in lines[1], lines
    assert laptop.call("release", ref.strip())[0] == 0
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "second\n"), err


def test_nothing_is_asked_for_what_cannot_be_sent(laptop: Laptop, pool: Node, tmp_path: Path) -> None:
    code, _out, err = laptop.call("run", "--gpu", "1.5", "--", "true")
    assert code == 2 and "GPU count" in err
    code, _out, err = laptop.call("run", "--no-upload", "--env", "LD_PRELOAD=x", "--", "true")
    assert code == 1 and "environment: LD_PRELOAD cannot be set" in err
    assert not CapacityRequest.objects.exists() and not WorkUpload.objects.exists()
