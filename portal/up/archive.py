"""Backup and restore of a whole installation in one file, and the removal of the demo.

The file is a tar: `manifest.json` first (what it holds, of which version, with SHA-256 of each member),
`database.dump` (pg_dump's custom format: one consistent snapshot), `secrets.json`, then `media/…` and the
agent's identity. It is as secret as the installation: mode 0600.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portal.up.binaries import all_postgres
from portal.up.environment import beside
from portal.up.errors import UpError
from portal.up.layout import BASE_DIR, Layout, load_secrets, write_atomically
from portal.up.pair import running_pair
from portal.up.postgres import ADMIN, APP, EmbeddedPostgres

FORMAT = 1
KEPT_FOLDERS = ("media", "agent")
AGENT_KEPT = ("agent.json", "machine-id")  # who this machine's agent is; its queue and jobs are of the moment


@dataclass(frozen=True)
class Server:
    """How pg_dump, pg_restore and psql reach the database: their folder, options and environment."""

    programs: Path
    options: list[str]
    environment: dict[str, str]

    def run(self, program: str, *words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
        command = [str(self.programs / program), *self.options, *words]
        return subprocess.run(command, env=self.environment, check=False, capture_output=True, **more)

    def ask(self, sql: str) -> str:
        answer = self.run("psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql)
        if answer.returncode:
            raise UpError(f"the database refused: {_last_line(answer.stderr)}")
        return answer.stdout.decode().strip()


def _last_line(text: bytes) -> str:
    """The line that names the error, else the last, of a program's standard error."""
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "error:" in line.lower()]
    return (named or lines or ["no answer"])[-1]


@contextlib.contextmanager
def _server(layout: Layout, *, start: bool) -> Iterator[Server]:
    """The installation's database: the given one, the running one, or the folder's own started for the
    moment."""
    given = os.environ.get("DATABASE_URL")
    if given:
        yield _given_server(given, layout)
        return
    if layout.is_running():
        postgres = EmbeddedPostgres.of(layout, load_secrets(layout))
        yield _embedded_server(postgres, layout, ADMIN)
        return
    if not start and not (layout.postgres / "data" / "PG_VERSION").exists():
        raise UpError(f"there is no installation in {layout.root}; name its folder with --data DIR.")
    with running_pair(layout, with_valkey=False) as pair:
        yield _embedded_server(pair.postgres, layout, APP if start else ADMIN)


def _embedded_server(postgres: EmbeddedPostgres, layout: Layout, user: str) -> Server:
    """As administrator all is read, whoever made it; what is restored shall belong to the application's
    role."""
    options = postgres.options(user, layout.database)
    return Server(postgres.binaries.folder, options, postgres.client_environment(user))


def _given_server(url: str, layout: Layout) -> Server:
    """The programs of the first PostgreSQL here that is as new as the given server (pg_dump demands it)."""
    if layout.demo:
        url = beside(url, layout.database)
    url = url.replace("postgres://", "postgresql://", 1)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
    answer = "no PostgreSQL programs are installed"
    for binaries in sorted(all_postgres(), key=lambda item: item.major):
        server = Server(binaries.folder, [f"--dbname={url}"], environment)
        try:
            version = int(server.ask("SHOW server_version_num")) // 10000
        except UpError as error:
            answer = str(error)
            continue
        if binaries.major >= version:
            return server
        answer = f"the server is PostgreSQL {version}, newer than the installed pg_dump"
    raise UpError(f"the database at DATABASE_URL cannot be reached: {answer}")


def backup(file: Path, root: Path, *, demo: bool) -> int:
    """Write an installation to a file, also while it runs; an existing file is replaced only when all went
    well."""
    layout = Layout(root, demo)
    if not file.parent.is_dir():
        raise UpError(f"{file.parent} is no folder.")
    if not layout.status_file.exists() and Layout(root, not demo).status_file.exists():
        raise UpError(
            f"{root} holds no demo; leave out --demo."
            if demo
            else f"{root} holds only a demo; add --demo to back that up."
        )
    try:
        folder = tempfile.TemporaryDirectory(dir=file.parent, prefix=".backup-")
    except OSError as error:
        raise UpError(f"{file.parent} cannot be written: {error.strerror}.") from error
    with folder as scratch, _server(layout, start=False) as server:
        dump = Path(scratch) / "database.dump"
        migrations = [
            line.split("|")
            for line in server.ask("SELECT app, name FROM django_migrations ORDER BY id").splitlines()
        ]
        answer = server.run("pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={dump}")
        if answer.returncode:
            raise UpError(f"pg_dump failed: {_last_line(answer.stderr)}")
        members: list[tuple[str, Path]] = [("database.dump", dump)]
        if layout.secrets_file.exists():
            members.append(("secrets.json", layout.secrets_file))
        members += list(_kept_files(layout))
        manifest = {
            "format": FORMAT,
            "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "demo": demo,
            "postgres": server.ask("SHOW server_version"),
            "migrations": migrations,
            "members": {name: {"bytes": p.stat().st_size, "sha256": _digest(p)} for name, p in members},
        }
        finished = Path(scratch) / "whole"
        descriptor = os.open(finished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as handle:
            with tarfile.open(fileobj=handle, mode="w") as tar:
                _add_text(tar, "manifest.json", json.dumps(manifest, indent=1))
                for name, path in members:
                    tar.add(path, arcname=name, recursive=False)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(finished, file)
    size = file.stat().st_size
    print(f"{file}: {len(members)} files, {size / 1e6:.1f} MB. It holds the secrets too: keep it safe.")
    return 0


def _kept_files(layout: Layout) -> Iterator[tuple[str, Path]]:
    for folder in KEPT_FOLDERS:
        base = layout.home / folder
        for path in sorted(base.rglob("*")) if base.is_dir() else ():
            inside = path.relative_to(base)
            left_out = folder == "agent" and str(inside) not in AGENT_KEPT
            if path.is_file() and not path.is_symlink() and not left_out:
                yield f"{folder}/{inside.as_posix()}", path


def _digest(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o600, int(time.time())
    tar.addfile(info, io.BytesIO(data))


def restore(file: Path, root: Path, *, demo: bool) -> int:
    """Bring a backup back into an empty folder (or an empty given database). The file is checked before
    anything else."""
    layout = Layout(root, demo)
    if layout.root.exists() and layout.is_running():
        raise UpError(f"the installation in {root} is running; stop it first.")
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpupool-restore-")))
        manifest = _unpack(file, scratch)
        _refuse_newer(manifest)
        if (
            not os.environ.get("DATABASE_URL")
            and (layout.postgres / "data" / "PG_VERSION").exists()
            and not demo
        ):
            raise UpError(f"there is an installation in {root} already; restore into an empty folder.")
        layout.prepare()
        kept = scratch / "secrets.json"
        if kept.exists() and not layout.secrets_file.exists():
            write_atomically(layout.secrets_file, kept.read_text())
        server = stack.enter_context(_server(layout, start=True))
        if server.ask("SELECT to_regclass('public.django_migrations') IS NOT NULL") == "t":
            raise UpError("the database is not empty; restore into an empty one.")
        answer = server.run(
            "pg_restore",
            "--no-owner",
            "--no-privileges",
            "--no-comments",
            "--exit-on-error",
            "--single-transaction",
            str(scratch / "database.dump"),
        )
        if answer.returncode:
            raise UpError(f"pg_restore failed, nothing was written: {_last_line(answer.stderr)}")
        for folder in KEPT_FOLDERS:
            if (scratch / folder).is_dir():
                shutil.copytree(scratch / folder, layout.home / folder, dirs_exist_ok=True)
                (layout.home / folder).chmod(0o700)
        server.ask("ANALYZE")
    print(f"Restored {manifest['made_at']} into {layout.home}; start it with `manage.py up --data {root}`.")
    return 0


def _unpack(file: Path, folder: Path) -> dict[str, Any]:
    """Take the archive apart in a folder and check every member; the manifest."""
    try:
        with tarfile.open(file, mode="r:") as tar:
            tar.extractall(folder, filter="data")
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        members = manifest["members"]
    except FileNotFoundError:
        raise UpError(f"{file} does not exist or is no backup of this product.") from None
    except (tarfile.TarError, OSError, ValueError, KeyError) as error:
        raise UpError(f"{file} is damaged or no backup of this product: {error}") from None
    if manifest.get("format") != FORMAT:
        raise UpError(f"{file} has format {manifest.get('format')}; this version reads format {FORMAT}.")
    for name, said in members.items():
        path = folder / name
        if not path.is_file() or _digest(path) != said["sha256"]:
            raise UpError(f"{file} is damaged: {name} is not what the manifest says.")
    return manifest


def _refuse_newer(manifest: dict[str, Any]) -> None:
    """UpError where our own rooms have migrations in the backup that this version does not know."""
    folders = {"portal": BASE_DIR / "portal", "room": BASE_DIR}
    for app, name in manifest["migrations"]:
        base = next(
            (f / app / "migrations" for f in folders.values() if (f / app / "migrations").is_dir()), None
        )
        if base and not (base / f"{name}.py").exists():
            raise UpError(
                f"the backup is from a newer version (it has {app}.{name}); install that version first."
            )


def demo_remove(root: Path) -> int:
    """Drop the demo's database, Redis database and files; refused while the installation or its demo runs."""
    layout = Layout(root, demo=True)
    if not layout.root.exists() or not (layout.home.exists() or os.environ.get("DATABASE_URL")):
        print(f"There is no demo in {root}.")
        return 0
    if layout.is_running():
        raise UpError(f"the installation in {root} is running; stop it first.")
    given = os.environ.get("DATABASE_URL")
    if given:
        plain = _given_server(given, Layout(root))
        plain.ask(f'DROP DATABASE IF EXISTS "{layout.database}"')
    elif (layout.postgres / "data" / "PG_VERSION").exists():
        with running_pair(layout) as pair:
            pair.postgres.psql(f'DROP DATABASE IF EXISTS "{layout.database}"')
            if pair.valkey:
                pair.valkey.flush(layout.redis_db)
    shutil.rmtree(layout.home, ignore_errors=True)
    print(f"The demo in {root} is gone.")
    return 0
