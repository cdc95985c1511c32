"""Slurm's answers in both forms, host lists, GRES; the batch script; settings. No Slurm, no database."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.executors.base import TerminalFailure
from pool.executors.slurm import orders, read, text
from pool.executors.slurm.cli import sbatch_words
from pool.executors.slurm.files import read_piece
from pool.executors.slurm.read import Gres
from pool.executors.slurm.rest import submit_body
from pool.executors.slurm.script import ScriptOrder, batch_script
from pool.executors.slurm.settings import SlurmSettings, problems
from pool.executors.slurm.transport import JobOrder

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "samples" / "authored" / "slurm"
UID = "0193a2f0-7c1e-7d2a-9b1c-2f3e4d5c6b7a"
OLD: dict[str, Any] = {
    "job_id": 7, "name": f"gpupool-{UID}", "job_state": "FAILED", "user_name": "lin", "account": "ml", "comment": "",
    "nodes": "gpu[1-2]", "gres_detail": ["gpu:a100:2(IDX:0,3)", "gpu:a100:2(IDX:0-1)"], "exit_code": 768,
    "start_time": 1796089101, "end_time": 1796089701, "restart_cnt": 1, "cpus": 4,
    "tres_alloc_str": "cpu=4,mem=2G,node=2,billing=4,gres/gpu=4", "state_reason": "NonZeroExitCode",
}  # fmt: skip
NEW: dict[str, Any] = {
    **OLD,
    "job_state": ["FAILED"],
    "exit_code": {"status": ["ERROR"], "return_code": {"set": True, "infinite": False, "number": 3},
                  "signal": {"id": {"set": False, "infinite": False, "number": 0}, "name": ""}},
    "start_time": {"set": True, "infinite": False, "number": 1796089101},
    "end_time": {"set": True, "infinite": False, "number": 1796089701},
    "restart_cnt": 1,
    "cpus": {"set": True, "infinite": False, "number": 4},
}  # fmt: skip


def test_both_forms_of_a_job_say_the_same() -> None:
    job = read.job(OLD)
    assert job == read.job(NEW)
    assert (str(job.uid), job.nodes, job.exit_code, job.signal) == (UID, ("gpu1", "gpu2"), 3, None)
    assert (job.gpus, job.memory_mib, job.cpus, job.restarts) == (4, 2048, 4, 1)
    assert job.gres[0] == (Gres("gpu", "a100", 2, (0, 3)),)
    assert (job.over, job.cleaning, job.waiting) == (True, False, False)


@pytest.mark.parametrize(
    ("state", "over", "cleaning", "waiting"),
    [
        ("PENDING", False, False, True),
        (["PENDING", "REQUEUED"], False, False, True),
        ("RUNNING", False, False, False),
        (["RUNNING"], False, False, False),
        ("COMPLETING", False, True, False),
        (["CANCELLED", "COMPLETING"], True, True, False),
        (["NODE_FAIL", "REQUEUED"], False, False, True),
        ("OUT_OF_MEMORY", True, False, False),
    ],
)
def test_states_of_a_job(state: Any, over: bool, cleaning: bool, waiting: bool) -> None:
    job = read.job({**OLD, "job_state": state})
    assert (job.over, job.cleaning, job.waiting) == (over, cleaning, waiting)


def test_a_killed_job_has_a_signal_in_both_forms() -> None:
    new = {
        "return_code": {"set": True, "number": 0},
        "signal": {"id": {"set": True, "number": 9}, "name": "KILL"},
    }
    assert [read.job({**OLD, "exit_code": value}).signal for value in (9, new)] == [9, 9]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[1-3,07],login", ("gpu1", "gpu2", "gpu3", "gpu07", "login")),
        ("n[09-11]", ("n09", "n10", "n11")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("", ()),
        ("(null)", ()),
        ("single", ("single",)),
    ],
)
def test_host_lists(text: str, names: tuple[str, ...]) -> None:
    assert read.hosts(text) == names


def test_a_host_list_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"100,000"):
        read.hosts("n[1-99999999]")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:a100:4(S:0-1)", (Gres("gpu", "a100", 4),)),
        ("gpu:4", (Gres("gpu", "", 4),)),
        ("gpu:4(S:0-1)", (Gres("gpu", "", 4),)),  # P071
        ("gpu:(null):4(IDX:0-3)", (Gres("gpu", "", 4, (0, 1, 2, 3)),)),  # P071, G124
        ("gpu:a100:2,gpu:l40:1", (Gres("gpu", "a100", 2), Gres("gpu", "l40", 1))),  # P071
        ("gpu", (Gres("gpu", "", 1),)),
        ("gpu:(null):3(IDX:0-1,3)", (Gres("gpu", "", 3, (0, 1, 3)),)),
        ("gpu:t4:2(S:0),shard:t4:16(S:0)", (Gres("gpu", "t4", 2), Gres("shard", "t4", 16))),
        ("gres/gpu:a100=2", (Gres("gpu", "a100", 2),)),
        ("gpu:a100:0(IDX:N/A)", (Gres("gpu", "a100", 0),)),
        ("(null)", ()),
        ("craynetwork:2K", (Gres("craynetwork", "", 2048),)),
    ],
)
def test_gres(text: str, found: tuple[Gres, ...]) -> None:
    assert read.gres(text) == found


@given(st.text(max_size=60))
def test_no_gres_text_breaks_the_reader(text: str) -> None:
    read.gres(text)


@pytest.mark.shared
def test_recorded_nodes_of_several_versions() -> None:
    """G123: fewer cards than configured drain a node, with the reason; G125: a state is its base and its flags."""
    nodes = {node.name: node for node in text.nodes_text((SAMPLES / "01_scontrol_show_node.txt").read_text())}
    assert nodes["s01"].gres == (Gres("gpu", "a100", 4),)
    assert (nodes["s01"].cpus, nodes["s01"].memory_mib, nodes["s01"].up, nodes["s01"].closed) == (
        128, 1030000, True, "",
    )  # fmt: skip
    assert nodes["s03"].closed == "drain"
    assert nodes["s03"].reason.startswith("gres/gpu count reported lower than configured (3 < 4)")
    assert not nodes["s04"].up
    detailed = {n.name: n for n in text.nodes_text((SAMPLES / "02_scontrol_show_node_d.txt").read_text())}
    assert detailed["s01"].used == (Gres("gpu", "a100", 2, (0, 3)),)
    rows = json.loads((SAMPLES / "04_nodes_v0037.json").read_text())["nodes"]
    again = {node.name: node for node in map(read.node, rows)}
    assert (again["s01"].gres, again["s01"].states) == (nodes["s01"].gres, frozenset({"MIXED"}))


def test_mig_instances_are_packed_onto_cards_as_a_driver_could() -> None:
    node = read.SlurmNode(
        name="m1", states=frozenset({"IDLE"}), gres=read.gres("gpu:a100_3g.20gb:2,gpu:a100_1g.5gb:4")
    )
    settings = SlurmSettings(models={"a100": {"model": "A100", "memory_mib": 40960}})
    cards = orders.cards(node, settings)
    packed = [
        [(one["profile"], one["start"], one["size"]) for one in card["mig"]["slices"]] for card in cards
    ]
    assert packed == [
        [("3g.20gb", 0, 4), ("3g.20gb", 4, 4)],
        [("1g.5gb", 0, 1), ("1g.5gb", 1, 1), ("1g.5gb", 2, 1), ("1g.5gb", 3, 1)],
    ]  # fmt: skip
    assert [card["uuid"] for card in cards] == ["SLURM-m1-a100-mig-0", "SLURM-m1-a100-mig-1"]


def test_types_that_nobody_explained_are_named_and_left_out() -> None:
    node = read.SlurmNode(name="x1", states=frozenset(), gres=read.gres("gpu:frobnicator:2"))
    assert orders.cards(node, SlurmSettings()) == []
    assert orders.unknown_types(node, SlurmSettings()) == ["frobnicator"]


def script(command: str, tmp_path: Path, **values: Any) -> str:
    order = ScriptOrder(command=command, folder=str(tmp_path / "work"), environment={}, ours={}, **values)
    return batch_script(order)


def run(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash"], input=text, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "command",
    [
        "echo 'it'\"'\"'s fine'; exit 3",
        "printf '%s' \"$HOME\" >/dev/null; false || exit 3",
        "cat <<X\n$(echo in)\nX\nexit 3",
    ],
)
def test_a_script_ends_as_its_command_does(command: str, tmp_path: Path) -> None:
    assert run(script(command, tmp_path)).returncode == 3


def test_values_are_never_shell_text(tmp_path: Path) -> None:
    nasty = "a'b\"c$(touch /dev/shm/gpupool-never)`id`\n\\"
    order = ScriptOrder(
        "printf '%s' \"$NASTY\"", str(tmp_path / "w $(x)'"), {"NASTY": nasty}, {"GPUPOOL_USER": "l'i"}
    )
    done = run(batch_script(order))
    assert done.stdout == nasty
    assert not os.path.exists("/dev/shm/gpupool-never")
    assert (tmp_path / "w $(x)'").is_dir()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("CUDA_VISIBLE_DEVICES", "environment_reserved"),
        ("SLURM_JOB_ID", "environment_reserved"),
        ("GPUPOOL_USER", "environment_reserved"),
        ("BASH_ENV", "environment_reserved"),
        ("A;rm", "environment_name"),
        ("", "environment_name"),
    ],
)
def test_names_that_would_override_ours_are_refused(name: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(TerminalFailure) as refused:
        batch_script(ScriptOrder("true", str(tmp_path), {name: "1"}, {}))
    assert refused.value.code == code


def test_an_image_runs_where_the_cluster_can_and_is_refused_elsewhere(tmp_path: Path) -> None:
    text = script("echo hi", tmp_path, image="nvcr.io/x:1", image_runner="apptainer")
    assert "apptainer exec --nv -- docker://nvcr.io/x:1 bash -c" in text
    with pytest.raises(TerminalFailure) as refused:
        script("echo hi", tmp_path, image="nvcr.io/x:1")
    assert refused.value.code == "image_not_supported"


ORDER = JobOrder(
    "gpupool-x", "#!/bin/bash\n", ("g1", "g2"), "gpu:a100:2", 3, 900, 7, "/s", "/s/o.log", account="ml"
)


def test_an_order_in_the_words_of_each_interface() -> None:
    words = sbatch_words(ORDER)
    assert {
        "--nodelist=g1,g2",
        "--gres=gpu:a100:2",
        "--mem=900M",
        "--time=7",
        "--no-requeue",
        "--account=ml",
    } <= set(words)
    old, new = submit_body(ORDER, "v0.0.38")["job"], submit_body(ORDER, "v0.0.41")["job"]
    assert (old["gres"], old["nodelist"], old["time_limit"], old["memory_per_node"]) == (
        "gpu:a100:2",
        "g1,g2",
        7,
        900,
    )
    assert (new["tres_per_node"], new["required_nodes"]) == ("gres/gpu:a100:2", ["g1", "g2"])
    assert new["time_limit"] == {"set": True, "infinite": False, "number": 7}
    endless = submit_body(JobOrder(**{**ORDER.__dict__, "minutes": None}), "v0.0.41")["job"]
    assert endless["time_limit"]["infinite"] is True


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({}, {}),
        ({"transport": "rest"}, {"rest_url": "not_an_address"}),
        ({"transport": "rest", "rest_url": "unix:/run/rest.sock"}, {}),
        ({"transport": "rest", "rest_url": "http://user:pw@h"}, {"rest_url": "not_an_address"}),
        ({"folder": "/a/../b"}, {"folder": "not_an_absolute_path"}),
        ({"ssh_host": "-oProxyCommand=x"}, {"ssh_host": "not_a_name"}),
        ({"partition": "a b"}, {"partition": "not_a_name"}),
        ({"accounts": {"vg": "x;y"}}, {"accounts": "not_a_table_of_names"}),
        ({"models": {"a100": {"model": "A100", "memory_mib": 0}}}, {"models": "not_a_table_of_models"}),
        ({"timeout_s": True}, {"timeout_s": "not_between_1_and_60"}),
        ({"password": "x"}, {"password": "unknown_setting"}),
    ],
)
def test_settings(values: dict[str, Any], wrong: dict[str, str]) -> None:
    assert problems(values) == wrong


def test_output_is_read_from_plain_files_alone(tmp_path: Path) -> None:
    out = tmp_path / "output"
    out.mkdir()
    (out / "a.log").write_bytes(b"0123456789")
    assert read_piece(str(tmp_path), "a.log", 4) == b"456789"
    assert read_piece(str(tmp_path), "a.log", 10) == b""
    secret = tmp_path / "secret"
    secret.write_text("not for you")
    (out / "link.log").symlink_to(secret)
    os.link(secret, out / "hard.log")
    os.mkfifo(out / "pipe.log")
    assert [
        read_piece(str(tmp_path), name, 0) for name in ("link.log", "hard.log", "pipe.log", "none.log")
    ] == [b""] * 4
    os.rename(out, tmp_path / "real")
    out.symlink_to(tmp_path / "real")
    assert read_piece(str(tmp_path), "a.log", 0) == b""
