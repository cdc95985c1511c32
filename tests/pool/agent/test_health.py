"""Health checks of services: only changes are told, and a replica that stays ill is ended to be tried again."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from pool.agent import health
from pool.agent.health import Health, look
from pool.models import AllocationEvent, Node
from pool.services.work_news import replica_healthy, work_news
from portal.notify.models import Notification
from portal.ops.services.outbox import outbox_deliver
from tests.pool.agent.builders import allocation
from tests.pool.builders import cluster


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/ok": 200, "/moved": 302, "/bad": 503}.get(self.path, 404))
        self.end_headers()

    def log_message(self, *_args: Any) -> None:
        return


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_what_counts_as_well(port: int) -> None:
    def asked(**rule: Any) -> str:
        return asyncio.run(look(rule, "/nowhere"))

    assert asked(kind="http", port=port, path="/ok") == ""
    assert asked(kind="http", port=port, path="/moved") == ""
    assert asked(kind="http", port=port, path="/bad") == "HTTP 503"
    assert asked(kind="http", port=port, path="/ok HTTP/1.1\r\nX: y") == "not a path"
    assert asked(kind="tcp", port=port) == ""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert "Errno 111" in asked(kind="tcp", port=free.getsockname()[1])


class Replica:
    """A running job as the checks see it."""

    def __init__(self, rule: dict[str, Any]) -> None:
        self.folder, self.run, self.exit = "/nowhere", {"pid": 1}, None
        self.meta = {"health": rule}
        self.stopped: list[Any] = []

    def stop(self, signal: str, grace: float, error: dict[str, Any]) -> None:
        self.stopped.append(error["code"])
        self.exit = error  # type: ignore[assignment]


def test_changes_are_told_and_an_ill_replica_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["", "", "HTTP 503", "", "HTTP 500", "HTTP 500", "HTTP 500", ""]
    told: list[tuple[bool, str]] = []

    async def answer(_rule: Any, _folder: str) -> str:
        return answers.pop(0)

    monkeypatch.setattr(health, "look", answer)
    replica = Replica({"kind": "tcp", "port": 1, "every_s": 1e-6, "failures": 3})

    async def run() -> None:
        checks = Health(lambda _job, ok, facts: told.append((ok, facts.get("why", ""))))
        while not replica.stopped:
            checks.turn([replica])  # type: ignore[list-item]
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert told == [(True, ""), (False, "HTTP 503"), (True, ""), (False, "HTTP 500")]
    assert replica.stopped == ["unhealthy"] and len(answers) == 1


def test_a_replica_that_starts_up_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica({"kind": "tcp", "port": 1, "every_s": 1e-6, "failures": 1})

    async def ill(_rule: Any, _folder: str) -> str:
        return "refused"

    async def turns(checks: Health) -> None:
        for _ in range(5):
            checks.turn([replica])  # type: ignore[list-item]
            await asyncio.sleep(0.001)

    monkeypatch.setattr(health, "look", ill)
    asyncio.run(turns(Health(lambda *_args: None)))
    assert replica.stopped == []
    monkeypatch.setattr(health, "STARTING_SECONDS", 0.0)
    asyncio.run(turns(Health(lambda *_args: None)))
    assert replica.stopped == ["unhealthy"]


def test_a_command_runs_as_the_jobs_account_in_its_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from pool.agent import files

    for folder in (tmp_path, *tmp_path.parents):
        if folder.name.startswith(("pytest-of-", "pytest-", "popen-", "test_")):
            os.chmod(folder, 0o755)
    switch = os.geteuid() == 0
    account = {"name": "nobody", "uid": 65534, "gid": 65534, "switch": switch}
    job = {"account": account, "cwd": str(tmp_path), "env": {"PATH": "/usr/bin:/bin", "WANT": "65534"}}
    files.write_json(str(tmp_path / "job.json"), job)
    here = f'test "$(id -u)" = "$WANT" && test "$(pwd)" = "{tmp_path}"'
    want = here if switch else "true"
    for command, said in ((want, ""), ("exit 3", "the command ended with 3\n"), ("kill -9 $$", "signal 9")):
        files.write_json(str(tmp_path / "meta.json"), {"health": {"kind": "command", "command": command}})
        assert health.main(str(tmp_path)) == 0
        assert said in capfd.readouterr().out if said else capfd.readouterr().out == ""


@pytest.mark.django_db
def test_news_of_work_are_kept_once_and_only_from_its_own_node(
    django_capture_on_commit_callbacks: Any,
) -> None:
    node = Node.objects.create(name="mine", cluster=cluster("main"))
    member = allocation(node)
    at = "2026-12-01T02:00:00Z"
    uid = str(member.allocation.uid)
    over = {"allocation": uid, "used_mib": {"GPU-0": 30_000}, "limit_mib": 20_000, "policy": "notice"}

    def tell(kind: str, data: dict[str, Any], node_uid: Any = None) -> None:
        work_news({"kind": kind, "node_uid": str(node_uid or node.uid), "at": at, "data": data})

    tell("health", {"allocation": uid, "ok": False, "why": "HTTP 503"})
    assert not replica_healthy(member.allocation)
    tell("health", {"allocation": uid, "ok": True})
    tell("health", {"allocation": uid, "ok": True})
    assert replica_healthy(member.allocation)
    tell("over_share", over)
    tell("over_share", over)
    outbox_deliver()
    kept = list(AllocationEvent.objects.order_by("id").values_list("kind", flat=True))
    assert kept == ["health_failed", "health_ok", "over_share"]
    assert Notification.objects.filter(kind="pool.over_share").count() == 1
    for forged in (
        lambda: tell("over_share", over, uuid4()),
        lambda: tell("over_share", {**over, "allocation": str(uuid4())}),
        lambda: tell("over_share", {**over, "allocation": "'; drop"}),
        lambda: tell("health", {"allocation": uid, "member": "x"}),
        lambda: tell("other", over),
    ):
        forged()
    assert AllocationEvent.objects.count() == 3
