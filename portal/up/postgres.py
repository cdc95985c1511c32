"""The embedded PostgreSQL: made, started, asked and stopped through its own programs; no driver, no TCP."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from portal.up.accounts import Account, die_with_parent, service_account
from portal.up.binaries import PostgresBinaries, postgres_for
from portal.up.errors import UpError
from portal.up.layout import Layout

ADMIN = "postgres"
APP = "gpupool"
EXTENSIONS = ("btree_gist", "pg_trgm", "citext")
# Sized for one machine beside a web server and a worker; synchronous_commit and fsync stay on: nothing may be
# lost.
SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "120",
    "shared_buffers": "64MB",
    "max_wal_size": "512MB",
    "wal_compression": "on",
    "log_timezone": "UTC",
    "timezone": "UTC",
    "log_checkpoints": "off",
    "log_line_prefix": "%m [%p] %q%d ",
    "idle_in_transaction_session_timeout": "15min",
    "jit": "off",
}


@dataclass
class EmbeddedPostgres:
    """One database cluster in a data folder. Nothing here waits longer than the call says."""

    layout: Layout
    secrets: dict[str, str]
    binaries: PostgresBinaries
    account: Account

    @classmethod
    def of(cls, layout: Layout, secrets: dict[str, str]) -> "EmbeddedPostgres":
        binaries = postgres_for(layout.postgres / "data")
        return cls(layout, secrets, binaries, service_account(layout.postgres, binaries["postgres"]))

    @property
    def data(self) -> Path:
        return self.layout.postgres / "data"

    @property
    def is_made(self) -> bool:
        """False for an empty folder and for one whose first start was cut off half-way."""
        return (self.data / "PG_VERSION").exists() and not self._unfinished.exists()

    @property
    def _unfinished(self) -> Path:
        return self.layout.postgres / "initdb-unfinished"

    def _environment(self, **extra: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_", "GPUPOOL", "DATABASE"))}
        return {**kept, "LANG": "C.UTF-8", **extra}

    def initdb(self) -> subprocess.Popen[bytes]:
        """Start making the cluster; call `finish_initdb` when the process has ended."""
        self.account.give(self.layout.postgres)
        self._unfinished.touch()
        if self.data.exists():
            subprocess.run(["rm", "-rf", "--", str(self.data)], check=True)
        password_file = self.layout.postgres / "initdb-password"
        descriptor = os.open(password_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as handle:
            handle.write(self.secrets["postgres_admin"] + "\n")
        os.chown(password_file, self.account.uid, -1)
        locale = (
            ["--locale-provider=builtin", "--locale=C.UTF-8"]
            if self.binaries.major >= 17
            else ["--locale=C.UTF-8"]
        )
        return subprocess.Popen(
            self.account.command(
                self.binaries["initdb"],
                f"--pgdata={self.data}",
                f"--username={ADMIN}",
                f"--pwfile={password_file}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--no-instructions",
                *locale,
            ),
            cwd="/",
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGKILL),
            **self.account.popen,
        )

    def finish_initdb(self, process: subprocess.Popen[bytes]) -> None:
        """Close what `initdb` began; UpError with its own last line where it failed."""
        error = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
        (self.layout.postgres / "initdb-password").unlink(missing_ok=True)
        if process.wait() != 0:
            last = error.splitlines()[-1] if error else f"exit code {process.returncode}"
            raise UpError(f"the database could not be made in {self.data}: {last}")
        self._unfinished.unlink(missing_ok=True)

    def command(self, more: dict[str, str] | None = None) -> list[str]:
        """The server's command line, with further settings."""
        settings = {**SETTINGS, **(more or {}), "unix_socket_directories": str(self.layout.sockets)}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return self.account.command(self.binaries["postgres"], "-D", str(self.data), *words)

    def environment(self) -> dict[str, str]:
        return self._environment()

    def is_ready(self, pid: int | None = None) -> bool:
        """Whether the server (with this process id) says of itself that it takes connections."""
        try:
            lines = (self.data / "postmaster.pid").read_text().split("\n")
        except OSError:
            return False
        if len(lines) < 8 or lines[7].strip() != "ready":
            return False
        return pid is None or lines[0].strip() == str(pid)

    def psql(self, sql: str, *, database: str = "postgres") -> str:
        """Run statements as the cluster's administrator and give their bare output; UpError with the server's
        words."""
        answer = subprocess.run(
            [
                self.binaries["psql"],
                "-XAtq",
                "-v",
                "ON_ERROR_STOP=1",
                *self.options(ADMIN, database),
                "-f",
                "-",
            ],
            input=sql,
            capture_output=True,
            text=True,
            env=self.client_environment(ADMIN),
            check=False,
        )
        if answer.returncode != 0:
            raise UpError(
                f"the database refused: {answer.stderr.strip().splitlines()[-1:] or answer.returncode}"
            )
        return answer.stdout

    def options(self, user: str, database: str) -> list[str]:
        """Connection options that psql, pg_dump and pg_restore share."""
        return ["-h", str(self.layout.sockets), "-U", user, "-d", database]

    def client_environment(self, user: str) -> dict[str, str]:
        password = self.secrets["postgres_admin" if user == ADMIN else "postgres_app"]
        return self._environment(PGPASSWORD=password, PGCONNECT_TIMEOUT="10")

    def ensure_database(self, name: str) -> bool:
        """Make the application's role and a database that it owns; True when the database is new.

        The role is no superuser (it may make databases for tests), so a hole in a query is no way into the
        machine.
        """
        have = self.psql(
            f"SELECT 'role' FROM pg_roles WHERE rolname='{APP}' UNION ALL "
            f"SELECT 'db' FROM pg_database WHERE datname='{name}'"
        ).split()
        password = self.secrets["postgres_app"].replace("'", "''")
        if "role" not in have:
            self.psql(f"CREATE ROLE {APP} LOGIN CREATEDB PASSWORD '{password}'")
        if "db" in have:
            return False
        self.psql(
            f'CREATE DATABASE "{name}" OWNER {APP} STRATEGY file_copy'
            if self.binaries.major >= 15
            else f'CREATE DATABASE "{name}" OWNER {APP}'
        )
        self.psql("".join(f"CREATE EXTENSION IF NOT EXISTS {e};\n" for e in EXTENSIONS), database=name)
        return True

    def url(self, database: str) -> str:
        """DATABASE_URL of the application's role."""
        host = quote(str(self.layout.sockets), safe="/")
        return f"postgres://{APP}:{quote(self.secrets['postgres_app'], safe='')}@/{database}?host={host}"

    def take_over(self) -> None:
        """Stop a server that an earlier, killed supervisor left on this folder, and clear a stale pid
        file."""
        pid_file = self.data / "postmaster.pid"
        try:
            pid = int(pid_file.read_text().split("\n")[0])
        except (OSError, ValueError):
            return
        if not _serves(pid, self.data):
            pid_file.unlink(missing_ok=True)
            return
        for sig, patience in ((signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0)):
            os.kill(pid, sig)
            limit = time.monotonic() + patience
            while time.monotonic() < limit:
                if not _serves(pid, self.data):
                    return
                time.sleep(0.02)
        raise UpError(f"a database server (process {pid}) is still running on {self.data} and does not stop.")


def _serves(pid: int, data: Path) -> bool:
    """Whether that process is a PostgreSQL server on that folder (and not another that got its number
    later)."""
    try:
        if os.path.isdir("/proc/self"):
            return os.path.realpath(f"/proc/{pid}/cwd") == os.path.realpath(data)
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True
