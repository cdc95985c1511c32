"""`manage.py up --demo` beside an installation of one's own, and its removal."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.up.installation import PATIENCE, ROOT, clean_environment, open_folder, running, wait_for

pytestmark = [pytest.mark.up, pytest.mark.serial]


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder() as made:
        yield made / "data"


def _remove(folder: Path) -> subprocess.CompletedProcess[str]:
    return _beside(folder, "demo_remove")


def _beside(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A management command beside the installation of that folder."""
    return subprocess.run(
        [sys.executable, "manage.py", *words],
        cwd=ROOT,
        env=clean_environment(GPUPOOL_DATA_DIR=str(folder)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_demo_lives_apart_and_goes_without_trace(folder: Path) -> None:
    with running(folder) as own:
        own.wait_page()
        own.psql("CREATE TABLE kept (name text); INSERT INTO kept VALUES ('kept')")
        nodes = folder / "nodes.csv"
        nodes.write_text("node_id,cpu_milli,memory_mib,gpu,model\nn1,64000,262144,2,T4\n")
        done = _beside(folder, "import_fleet", str(nodes))
        assert (done.returncode, done.stderr) == (0, "")
        assert own.psql("SELECT name FROM pool_node WHERE name = 'n1'") == "n1"
    with running(folder, "--demo") as demo:
        demo.wait_page()
        for role in ("researcher", "department lead", "pool administrator", "finance", "auditor"):
            line = rf"^  [a-z.]+ +\S+ +{role}$"
            wait_for(
                lambda line=line: re.search(line, demo.said, re.MULTILINE), say=f"the sign-in of the {role}"
            )
        demo.wait_running("demo fleet")
        assert int(demo.psql("SELECT count(*) FROM pool_node")) >= 10
        assert demo.psql("SELECT to_regclass('kept') IS NULL") == "t"
        wait_for(
            lambda: (
                int(demo.psql("SELECT count(*) FROM pool_node WHERE last_heartbeat_at IS NOT NULL")) >= 10
            ),
            say="the simulated nodes' first words",
        )
        refused = _remove(folder)
        assert refused.returncode != 0 and "running" in refused.stderr
    answer = _remove(folder)
    assert answer.returncode == 0, answer.stderr
    assert not (folder / "demo").exists()
    assert "no demo" in _remove(folder).stdout
    with running(folder) as own:
        own.wait_page()
        assert own.psql("SELECT name FROM kept") == "kept"
        assert own.psql("SELECT count(*) FROM pg_database WHERE datname = 'gpupool_demo'") == "0"
