"""A running demonstration loses its Redis and its PostgreSQL under people's hands and under a node's telemetry:
nothing acknowledged is lost, nothing is doubled, the open wall goes on by itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
import urllib.parse
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pool.agent import ws
from tests.chromium import PATIENCE_MS, browsing
from tests.up.installation import PATIENCE, Installation, open_folder, running, wait_for
from tests.up.test_main_job import Api

pytestmark = [pytest.mark.up, pytest.mark.serial]
WRITERS = 4
PAUSE = 0.05


def password(installation: Installation) -> str:
    """Everybody's password in the demonstration."""
    found = re.search(r"lin\.yue\s+(\S+)", installation.said)
    assert found is not None, installation.said
    return found.group(1)


def test_redis_and_postgresql_killed_under_open_pages_and_load() -> None:
    with open_folder() as home, running(home / "data", "--demo") as installation:
        installation.wait_page()
        installation.wait_running()
        wait_for(lambda: "lin.yue" in installation.said, say="the sign-ins")
        wall_survives_redis(installation)
        requests_survive_postgresql(installation)
        samples_survive_both(installation)


def kill(installation: Installation, name: str) -> None:
    """kill -9, and until the supervisor has started it anew."""
    pid = installation.pid(name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: installation.pid(name) not in (None, pid), say=f"{name} again")


def wall_survives_redis(installation: Installation) -> None:
    """The wall's clock of data goes on after Redis was killed, without a reload."""
    with browsing() as browser:
        context = browser.new_context()
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{installation.port}/accounts/login/")
        page.fill("input[name=username]", "zhao.rui")
        page.fill("input[type=password]", password(installation))
        page.press("input[type=password]", "Enter")
        page.wait_for_url(lambda url: "/login" not in url)
        page.goto(f"http://127.0.0.1:{installation.port}/wall/")
        page.evaluate("window.sameDocument = true")

        def moment() -> str:
            found = re.search(r"\d\d:\d\d:\d\d", page.locator(".live").first.inner_text())
            return found.group(0) if found else ""

        first = wait_for(moment, say="live data")
        wait_for(lambda: moment() not in ("", first), say="moving data")
        kill(installation, "valkey")
        before = moment()
        wait_for(lambda: moment() not in ("", before), say="data after Redis came back")
        assert page.evaluate("window.sameDocument") is True
        context.close()


def requests_survive_postgresql(installation: Installation) -> None:
    """Writers send requests, each with its own client token, and repeat what was not answered, while PostgreSQL is
    killed. In the end each acknowledged one is there, once."""
    base = f"http://127.0.0.1:{installation.port}"
    flavour = Api(base, "zhao.rui", password(installation)).get("/api/v1/flavours/")["results"][0]["code"]
    Api(
        base, "lin.yue", password(installation)
    )  # the first sign-in strengthens the hash, which ends older sessions
    acknowledged: list[str] = []
    refused: list[str] = []
    stop = threading.Event()

    def write() -> None:
        try:
            api = Api(base, "lin.yue", password(installation))
        except (AssertionError, OSError) as error:
            refused.append(str(error))
            return
        while not stop.is_set():
            token = uuid.uuid4().hex
            for _attempt in range(200):
                try:
                    made = api.post(
                        "/api/v1/requests/",
                        client_token=token,
                        department="video",
                        flavour=flavour,
                        shape="whole",
                        gpus_per_node=1,
                        nodes=1,
                        duration_s=3600,
                        run_kind="command",
                        command="true",
                        purpose="fault test",
                    )
                except AssertionError as error:
                    if " 5" not in str(error)[:40]:
                        refused.append(str(error))
                        stop.set()
                        return
                    time.sleep(PAUSE)
                except (OSError, json.JSONDecodeError):
                    time.sleep(PAUSE)
                else:
                    acknowledged.append(made["uid"])
                    break
            time.sleep(PAUSE)

    writers = [threading.Thread(target=write) for _ in range(WRITERS)]
    for writer in writers:
        writer.start()
    wait_for(lambda: refused or len(acknowledged) > 8, say="the first requests")
    assert refused == []
    kill(installation, "postgres")
    seen = len(acknowledged)
    wait_for(lambda: refused or len(acknowledged) > seen + 8, say="requests after PostgreSQL came back")
    stop.set()
    for writer in writers:
        writer.join(PATIENCE)
    assert refused == []
    rows = installation.psql("SELECT uid FROM quotas_capacityrequest WHERE purpose = 'fault test'").split()
    assert len(acknowledged) == len(set(acknowledged))
    assert set(acknowledged) <= set(rows)
    tokens = installation.psql("SELECT count(*) - count(DISTINCT client_token) FROM quotas_capacityrequest")
    assert tokens.strip() in ("0", str(_without_token(installation)))
    assert Path(installation.home / "status.json").exists()


def _without_token(installation: Installation) -> int:
    """How many more rows than distinct tokens there are because the demo's own have none."""
    empty = int(installation.psql("SELECT count(*) FROM quotas_capacityrequest WHERE client_token = ''"))
    return max(0, empty - 1)


class Stream:
    """A node that sends one sample after another on the agent's socket, keeps each until it is acknowledged, and
    connects again and sends again what was not, as the agent's spool does."""

    def __init__(self, base: str, token: str, name: str) -> None:
        self.base, self.token = base, token
        self.card = f"GPU-{uuid.uuid4()}"
        self.hello = {
            "t": "hello", "v": 1, "hostname": name, "machine_id": f"m-{name}", "jobs": [],
            "facts": {"nvml": {"ok": True, "reason": None}, "cpu_milli": 8000, "memory_mib": 64000},
            "gpus": [{"uuid": self.card, "index": 0, "name": "NVIDIA A100-SXM4-80GB", "memory_mib": 81920}],
        }  # fmt: skip
        self.began = datetime.now(UTC)
        self.sent = 0
        self.waiting: dict[int, str] = {}
        self.acknowledged: list[int] = []
        self.connections = 0
        self.stop = threading.Event()

    def run(self) -> None:
        """In a thread of its own, until told to stop and all is acknowledged."""
        asyncio.run(self._go())

    async def _go(self) -> None:
        while not (self.stop.is_set() and not self.waiting):
            try:
                socket = await ws.connect(
                    f"ws{self.base[4:]}/agent/ws/", {"Authorization": f"Bearer {self.token}"}
                )
            except (OSError, EOFError, ws.WebSocketError):
                await asyncio.sleep(PAUSE)
                continue
            talk = [asyncio.ensure_future(self._hear(socket)), asyncio.ensure_future(self._say(socket))]
            done, left = await asyncio.wait(talk, return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
            await asyncio.gather(*talk, return_exceptions=True)
            socket.abort()

    async def _hear(self, socket: ws.WebSocket) -> None:
        while True:
            message = json.loads(await socket.receive())
            if message["t"] == "welcome":
                self.connections += 1
                for text in list(self.waiting.values()):
                    await socket.send(text)
            elif message["t"] == "ack" and self.waiting.pop(message["seq"], None) is not None:
                self.acknowledged.append(message["seq"])

    async def _say(self, socket: ws.WebSocket) -> None:
        known = self.connections
        await socket.send(json.dumps(self.hello))
        while self.connections == known:
            await asyncio.sleep(0.01)
        while not (self.stop.is_set() and not self.waiting):
            if not self.stop.is_set() and len(self.waiting) < 64:
                self.sent += 1
                at = (self.began + timedelta(milliseconds=self.sent)).isoformat(timespec="milliseconds")
                row = [self.card, None, at, {"util": 40, "mem_used": 100, "mem_total": 81920}, {}, []]
                text = json.dumps({"t": "samples", "seq": self.sent, "rows": [row]})
                self.waiting[self.sent] = text
                await socket.send(text)
            await asyncio.sleep(PAUSE)


def samples_survive_both(installation: Installation) -> None:
    """A node streams its telemetry while Redis and then PostgreSQL is killed: in the end each sample is there, once."""
    base = f"http://127.0.0.1:{installation.port}"
    chief = Api(base, "zhao.rui", password(installation))
    cluster = installation.psql("SELECT code FROM pool_cluster WHERE executor = 'agent' ORDER BY id LIMIT 1")
    form = urllib.parse.urlencode({"cluster": cluster, "node_name": "streamer"}).encode()
    page = chief._send("POST", "/nodes/enrol/", form, "application/x-www-form-urlencoded").decode()
    code = re.search(r"\b[A-Z2-7]{4}(?:-[A-Z2-7]{4}){3}\b", page)
    assert code is not None, page
    token = chief.post("/agent/enrol/", code=code.group(0), hostname="streamer", machine_id="m-streamer")[
        "token"
    ]
    stream = Stream(base, token, "streamer")
    thread = threading.Thread(target=stream.run)
    thread.start()
    try:
        for part in ("valkey", "postgres"):
            seen = len(stream.acknowledged)
            wait_for(lambda seen=seen: len(stream.acknowledged) > seen + 8, say=f"samples before {part}")
            kill(installation, part)
            seen = len(stream.acknowledged)
            wait_for(lambda seen=seen: len(stream.acknowledged) > seen + 8, say=f"samples after {part}")
    finally:
        stream.stop.set()
        thread.join(PATIENCE)
    assert not thread.is_alive() and stream.waiting == {}
    assert sorted(stream.acknowledged) == list(range(1, stream.sent + 1))
    kept = installation.psql(
        "SELECT count(*) || ' ' || count(DISTINCT s.at) FROM monitoring_gpusample s "
        f"JOIN pool_gpu g ON g.id = s.gpu_id WHERE g.uuid = '{stream.card}'"
    )
    assert kept == f"{stream.sent} {stream.sent}", "each sample once"
