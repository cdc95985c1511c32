"""Device files of a hold, as ordinary files: one account may use them, nobody else, and afterwards all is as before."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pool.agent import devices
from pool.agent.accounts import Account
from pool.agent.jobs import Jobs
from pool.agent.outbox import Outbox

HOLDER, OTHER = 61001, 61002
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes who may use a device")
ALLOCATION = "01a22e77-76a8-79e1-84ec-88011de29caf"


@pytest.fixture
def cards(tmp_path: Path) -> list[str]:
    """Two files with the mode that the driver gives its devices, in a folder that all may enter."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.name.startswith(("pytest-of-", "pytest-", "popen-", "test_")):
            os.chmod(folder, 0o755)
    found = []
    for minor in (0, 1):
        path = tmp_path / f"nvidia{minor}"
        path.touch()
        path.chmod(0o666)
        found.append(str(path))
    return found


def usable(path: str, uid: int) -> bool:
    """Whether an account can open it for reading and writing, tried in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.close(os.open(path, os.O_RDWR))
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def facts(path: str) -> tuple[int, int, list[str]]:
    state = os.stat(path)
    return stat.S_IMODE(state.st_mode), state.st_uid, os.listxattr(path)


def test_cards_are_found_by_the_minor_number_of_the_driver() -> None:
    gpus = [{"uuid": "GPU-a", "minor": 3}, {"uuid": "GPU-b", "minor": None}, {"uuid": "GPU-c", "minor": 0}]
    assert devices.paths(gpus, ["GPU-c", "GPU-a", "GPU-b", "GPU-x"]) == ["/dev/nvidia0", "/dev/nvidia3"]


@as_root
@pytest.mark.parametrize("lists", [True, False])
def test_open_to_one_account_alone_and_closed_as_it_was(
    cards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists: bool
) -> None:
    def none(*_args: Any) -> None:
        raise OSError(errno.ENOTSUP, "no lists here")

    if not lists:
        monkeypatch.setattr(os, "setxattr", none)
    before = [facts(path) for path in cards]
    assert usable(cards[0], OTHER)
    assert devices.open_to(str(tmp_path), [cards[0], str(tmp_path / "gone")], HOLDER, HOLDER) == [cards[0]]
    assert (usable(cards[0], HOLDER), usable(cards[0], OTHER)) == (True, False)
    assert usable(cards[1], OTHER)  # another card is not touched
    os.chmod(cards[0], 0o666)  # what the driver's helper does when a program starts
    devices.keep(str(tmp_path))
    assert (usable(cards[0], HOLDER), usable(cards[0], OTHER)) == (True, False)
    devices.close(str(tmp_path))
    assert [facts(path) for path in cards] == before
    assert not (tmp_path / devices.RECORD).exists()
    devices.close(str(tmp_path))  # twice is once


def jobs_of(tmp_path: Path, cards: list[str], monkeypatch: pytest.MonkeyPatch) -> Jobs:
    os.makedirs(tmp_path / "state" / "jobs", exist_ok=True)
    account = Account("holder", HOLDER, HOLDER, "/", "/bin/sh", True)
    monkeypatch.setattr("pool.agent.accounts.resolve", lambda *_args: account)
    jobs = Jobs(str(tmp_path / "state"), str(tmp_path / "work"), Outbox(str(tmp_path / "outbox"), 1 << 20))
    jobs.device_files = lambda uuids: [cards[int(uuid[-1])] for uuid in uuids]
    return jobs


def order(**more: Any) -> dict[str, Any]:
    return {"hold": True, "gpu_uuids": ["GPU-0"], "charge_milli": 1000, "user": "lin", **more}


@as_root
def test_a_hold_has_its_card_alone_until_its_end_is_told(
    cards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(tmp_path, cards, monkeypatch)
    job = jobs._make(ALLOCATION, 0, order())
    assert (usable(cards[0], HOLDER), usable(cards[0], OTHER)) == (True, False)
    job.give_up("exited", None, "", False)
    job.report()
    assert usable(cards[0], OTHER)
    assert facts(cards[0])[0] == 0o666


@as_root
def test_the_next_agent_closes_what_this_one_opened(
    cards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(tmp_path, cards, monkeypatch)
    jobs._make(ALLOCATION, 0, order()).give_up("exited", None, "", False)  # and the agent is killed here
    again = jobs_of(tmp_path, cards, monkeypatch)
    again.adopt()
    again.poll()
    assert usable(cards[0], OTHER)


@as_root
@pytest.mark.parametrize(
    "spec",
    [
        order(charge_milli=500, gpu_mem_limit_mib=40_000),
        order(mig_uuids=["MIG-1"], charge_milli=428),
        order(hold=False, argv=["true"]),
    ],
)
def test_shared_cards_and_commands_leave_the_device_as_it_is(
    cards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]
) -> None:
    jobs_of(tmp_path, cards, monkeypatch)._make(ALLOCATION, 0, spec)
    assert usable(cards[0], OTHER)
    assert facts(cards[0]) == (0o666, 0, [])


@as_root
def test_a_device_that_cannot_be_opened_to_them_refuses_the_start_and_stays(
    cards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: Any) -> None:
        raise OSError(errno.EPERM, "not permitted")

    jobs = jobs_of(tmp_path, cards, monkeypatch)
    monkeypatch.setattr(os, "setxattr", refused)
    assert jobs.start(ALLOCATION, 0, order()) is None
    said = [m for m in jobs.outbox.vital.messages() if m.get("t") == "job"]
    assert [(m["state"], m["error"]["code"], m["error"]["retryable"]) for m in said] == [
        ("failed_start", "device_not_opened", True)
    ]
    assert facts(cards[0]) == (0o666, 0, [])
    assert os.listdir(tmp_path / "state" / "jobs") == []  # nothing that the next agent would start
