"""The embedded database and Redis pair alone, for tests, backups and measurements: started, used, stopped."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from portal.up.accounts import service_account
from portal.up.binaries import valkey_server
from portal.up.errors import UpError
from portal.up.layout import Layout, load_secrets
from portal.up.postgres import EmbeddedPostgres
from portal.up.process import spawn
from portal.up.status import end_leftovers
from portal.up.valkey import EmbeddedValkey


@dataclass(frozen=True)
class Pair:
    """Two running servers and the variables that lead to them."""

    postgres: EmbeddedPostgres
    valkey: EmbeddedValkey | None
    database_url: str
    redis_url: str

    @property
    def environment(self) -> dict[str, str]:
        return {"DATABASE_URL": self.database_url, "REDIS_URL": self.redis_url}


@contextlib.contextmanager
def running_pair(
    layout: Layout, *, with_valkey: bool = True, settings: dict[str, str] | None = None
) -> Iterator[Pair]:
    """Start PostgreSQL (made where the folder is empty) and Valkey in a folder that nobody uses; stop them
    after.

    Holds the folder's lock. UpError where it is in use or a server does not start. To be used from the main
    thread: the servers end with the thread that started them. `settings` are further ones of PostgreSQL.
    """
    layout.prepare()
    lock = layout.lock()
    end_leftovers(layout.status_file)
    secrets = load_secrets(layout)
    postgres = EmbeddedPostgres.of(layout, secrets)
    account = postgres.account
    account.give(layout.postgres)
    account.give(layout.sockets)
    postgres.take_over()
    if not postgres.is_made:
        postgres.finish_initdb(postgres.initdb())
    log = layout.logs
    server = spawn(
        postgres.command(settings),
        log=log / "postgres.log",
        environment=postgres.environment(),
        death_signal=signal.SIGINT,
        **account.popen,
    )
    started = [(server, signal.SIGINT)]
    valkey = None
    try:
        if with_valkey:
            valkey = EmbeddedValkey(layout, valkey_server(), service_account(layout.valkey, valkey_server()))
            valkey.account.give(layout.valkey)
            valkey.socket.unlink(missing_ok=True)
            environment = {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8"}
            started.append(
                (
                    spawn(
                        valkey.command(),
                        log=log / "valkey.log",
                        environment=environment,
                        death_signal=signal.SIGTERM,
                        **valkey.account.popen,
                    ),
                    signal.SIGTERM,
                )
            )
        limit = time.monotonic() + 60
        while not postgres.is_ready(server.pid) or (valkey and not valkey.is_ready()):
            ended = next((p for p, _ in started if p.poll() is not None), None)
            if ended or time.monotonic() > limit:
                raise UpError(f"the database or Redis server does not start; see {log}.")
            select.select([], [], [], 0.01)
        postgres.ensure_database(layout.database)
        yield Pair(
            postgres,
            valkey,
            postgres.url(layout.database),
            valkey.url(layout.redis_db) if valkey else "",
        )
    finally:
        for process, sig in reversed(started):
            if process.poll() is None:
                process.send_signal(sig)
        for process, _ in reversed(started):
            try:
                process.wait(20)
            except Exception:
                process.kill()
                process.wait()
        lock.close()
