"""A running demonstration loses its Redis and its PostgreSQL under people's hands: nothing acknowledged is lost,
nothing is doubled, the open wall goes on by itself."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest

from tests.chromium import browsing
from tests.up.installation import Installation, open_folder, running, wait_for
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
        wait_for(lambda: moment() not in ("", first), say="moving data", limit=30)
        kill(installation, "valkey")
        before = moment()
        wait_for(lambda: moment() not in ("", before), say="data after Redis came back", limit=60)
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
        except AssertionError as error:
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
        writer.join(60)
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
