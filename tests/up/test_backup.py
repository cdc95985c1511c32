"""The drill: a whole installation to one file, and back into an empty folder."""

from __future__ import annotations

import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.up.installation import ROOT, clean_environment, open_folder, running

pytestmark = [pytest.mark.up, pytest.mark.serial]


def _manage(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", *words],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder() as made:
        yield made


def test_drill(folder: Path) -> None:
    old, new, file = folder / "old", folder / "new", folder / "all.backup"
    with running(old) as installation:
        installation.wait_page()
        installation.psql("CREATE TABLE kept (name text); INSERT INTO kept VALUES ('长安 — kept')")
        (old / "media" / "logo").mkdir()
        (old / "media" / "logo" / "a b.svg").write_text("<svg/>")
        answer = _manage("backup", str(file), "--data", str(old))
        assert answer.returncode == 0, answer.stderr
        tables = installation.psql(
            "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'"
        )
        people = installation.psql("SELECT string_agg(username || password, ',') FROM accounts_user")
        # while it runs, nothing is restored over it
        refused = _manage("restore", str(file), "--data", str(old))
        assert refused.returncode != 0 and "running" in refused.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    answer = _manage("restore", str(file), "--data", str(new))
    assert answer.returncode == 0, answer.stderr
    assert (new / "secrets.json").read_text() == (old / "secrets.json").read_text()
    assert (new / "media" / "logo" / "a b.svg").read_text() == "<svg/>"
    with running(new) as installation:
        installation.wait_running()  # all that it says at a start is said
        assert installation.psql("SELECT name FROM kept") == "长安 — kept"
        assert installation.psql("SELECT string_agg(username || password, ',') FROM accounts_user") == people
        count = installation.psql(
            "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'"
        )
        assert count == tables
        assert installation.first_sign_in() is None
    refused = _manage("restore", str(file), "--data", str(new))
    assert refused.returncode != 0 and "already" in refused.stderr


def test_damaged_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(b"not a tar at all")
    answer = _manage("restore", str(bad), "--data", str(tmp_path / "new"))
    assert answer.returncode != 0 and "damaged" in answer.stderr and not (tmp_path / "new").exists()
    with tarfile.open(bad, "w") as tar:
        (tmp_path / "manifest.json").write_text('{"format": 99, "members": {}, "migrations": []}')
        tar.add(tmp_path / "manifest.json", "manifest.json")
    answer = _manage("restore", str(bad), "--data", str(tmp_path / "new"))
    assert answer.returncode != 0 and "format 99" in answer.stderr and not (tmp_path / "new").exists()
    answer = _manage("restore", str(tmp_path / "absent"), "--data", str(tmp_path / "new"))
    assert answer.returncode != 0 and len(answer.stderr.strip().splitlines()) == 1


def test_backup_of_nothing(tmp_path: Path) -> None:
    answer = _manage("backup", str(tmp_path / "b"), "--data", str(tmp_path / "none"))
    assert answer.returncode != 0 and "no installation" in answer.stderr
    assert not (tmp_path / "b").exists() and not (tmp_path / "none").exists()
    closed = _manage("backup", "/proc/b", "--data", str(tmp_path / "none"))
    assert (
        closed.returncode != 0 and "cannot be written" in closed.stderr and "Traceback" not in closed.stderr
    )


def test_backup_of_a_folder_with_only_a_demo_and_of_one_without(tmp_path: Path) -> None:
    for has, option, hint in (("demo", [], "add --demo"), ("", ["--demo"], "leave out --demo")):
        root = tmp_path / f"of-{has or 'real'}"
        (root / has).mkdir(parents=True)
        (root / has / "status.json").write_text("{}")
        answer = _manage("backup", str(tmp_path / "b"), "--data", str(root), *option)
        assert answer.returncode != 0
        assert hint in answer.stderr
        assert len(answer.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "b").exists()
