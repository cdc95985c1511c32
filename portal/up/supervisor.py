"""What an installation is made of and in which order it starts. One thread, no Django."""

import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portal.up.accounts import service_account
from portal.up.address import Address, listen
from portal.up.binaries import valkey_server
from portal.up.environment import agent_environment, beside, other_number, site_environment
from portal.up.errors import UpError
from portal.up.forks import Forks
from portal.up.layout import BASE_DIR, Layout, load_secrets
from portal.up.loop import Loop, Stopped
from portal.up.postgres import EmbeddedPostgres
from portal.up.process import Handle, spawn
from portal.up.status import StatusFile, end_leftovers
from portal.up.valkey import EmbeddedValkey

FIRST_LOGIN = "admin"


@dataclass(frozen=True)
class Options:
    """What the command line said."""

    root: Path
    demo: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    agent: bool = True


class Supervisor(Loop):
    """One run of an installation."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.layout = Layout(options.root, options.demo)

    # -- the run ------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Start everything, keep it until a signal, stop it. UpError where it cannot start."""
        self.layout.prepare()
        self.lock = self.layout.lock()
        self._take_over()
        self.address: Address = listen(self.options.host, self.options.port)
        self.status = StatusFile(self.layout.status_file, address=self.address.shown, demo=self.options.demo)
        self._signals()
        what = "demo" if self.options.demo else "installation"
        print(f"Starting the {what} in {self.layout.home} (Ctrl-C stops it).", flush=True)
        try:
            self._start()
            self._keep()
        except Stopped:
            pass
        finally:
            self._stop()
        return 0

    def _take_over(self) -> None:
        """Clear what an earlier supervisor that was killed left behind."""
        for home in {self.layout.home, self.layout.root, self.layout.root / "demo"}:
            ended = end_leftovers(home / "status.json")
            if ended:
                self.say(f"ended what an earlier start had left running: {', '.join(ended)}")

    # -- starting -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._servers_given = (os.environ.get("DATABASE_URL"), os.environ.get("REDIS_URL"))
        keys = load_secrets(self.layout)
        self.environment = site_environment(self.layout, self.address, keys)
        forks = self.forks = Forks(
            log=self.layout.logs / "fork.log",
            environment=self.environment,
            inherited=(self.address.listening.fileno(),),
            on_report=self._reported,
        )
        database = self._plan_servers(keys)
        self._child("fork", forks.start, patience=3.0)
        self._want("fork")
        if database:
            self._start_database(database)
        if self.valkey:
            self._wait("valkey", self.valkey.is_ready, "Valkey")
            self.children["valkey"].ready = True
        self._wait("fork", lambda: forks.loaded, "the site")
        self.children["fork"].ready = True
        self.say("site loaded")
        self._prepare(keys)
        self._demo_first()
        self._pages()
        self._rest()

    def _plan_servers(self, keys: dict[str, str]) -> EmbeddedPostgres | None:
        """Decide which servers are ours, set their addresses, and start Valkey, which is quick."""
        given_database, given_redis = self._servers_given
        database = None
        self.valkey: EmbeddedValkey | None = None
        if given_database:
            name = self.layout.database
            self.environment["DATABASE_URL"] = (
                beside(given_database, name) if self.options.demo else given_database
            )
            self.say("database: the given DATABASE_URL")
        else:
            database = EmbeddedPostgres.of(self.layout, keys)
            database.account.give(self.layout.postgres)
            database.account.give(self.layout.sockets)
            self.environment["DATABASE_URL"] = database.url(self.layout.database)
        if given_redis:
            self.environment["REDIS_URL"] = other_number(given_redis) if self.options.demo else given_redis
            self.say("Redis: the given REDIS_URL")
        else:
            program = valkey_server()
            account = database.account if database else service_account(self.layout.valkey, program)
            valkey = self.valkey = EmbeddedValkey(self.layout, program, account)
            account.give(self.layout.valkey)
            account.give(self.layout.sockets)
            valkey.socket.unlink(missing_ok=True)
            self.environment["REDIS_URL"] = valkey.url(self.layout.redis_db)
            self._child(
                "valkey", lambda: self._server("valkey", valkey.command(), account.popen), patience=10.0
            )
            self._want("valkey")
        return database

    def _start_database(self, database: EmbeddedPostgres) -> None:
        database.take_over()
        first = not database.is_made
        if first:
            self.say(
                f"making the database (PostgreSQL {database.binaries.major}, {database.binaries.source})"
            )
            making = database.initdb()
            try:
                self._until(lambda: making.poll() is not None)
            finally:
                if making.poll() is None:
                    making.kill()
            database.finish_initdb(making)
        self._child(
            "postgres",
            lambda: self._server(
                "postgres",
                database.command(),
                database.account.popen,
                environment=database.environment(),
                cwd=str(database.data) if os.access(database.data, os.X_OK) else "/",
                death_signal=signal.SIGINT,
            ),
            stop_signal=signal.SIGINT,
            patience=30.0,
        )
        self._want("postgres")
        self._wait("postgres", lambda: database.is_ready(self.children["postgres"].pid), "the database")
        self.children["postgres"].ready = True
        database.ensure_database(self.layout.database)
        self.say("database ready")

    def _server(self, name: str, command: list[str], popen: dict[str, Any], **more: Any) -> Handle:
        more.setdefault("environment", {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8"})
        more.setdefault("death_signal", signal.SIGTERM)
        return spawn(command, log=self.layout.logs / f"{name}.log", **more, **popen)

    def _prepare(self, keys: dict[str, str]) -> None:
        """Migrate and make what only a first start makes."""
        password = secrets.token_urlsafe(9)
        what = {
            "demo": self.options.demo,
            "given": bool(self._servers_given[0]),
            "given_redis": bool(self._servers_given[1]),
            "login": FIRST_LOGIN,
            "password": password,
            "agent_state": str(self.layout.home / "agent"),
        }
        self._once("prepare", "prepare", [what])
        self._run_once("prepare", "the start could not be prepared")
        result = self._results.get("prepare", {})
        self._agent_possible = bool(result.get("agent")) and self.options.agent
        self._sign_in = (FIRST_LOGIN, password) if result.get("made") else None

    def _demo_first(self) -> None:
        if not self.options.demo:
            return
        self.say("demo: departments, people and fleet")
        self._once("demo seed", "manage", ["demo_seed", "--stage", "first"])
        self._run_once("demo seed", "the demo could not be made")

    def _pages(self) -> None:
        count = max(1, int(os.environ.get("GPUPOOL_WEB_PROCESSES", "1")))
        for number in range(1, count + 1):
            name = "web" if number == 1 else f"web {number}"
            self._forked(name, "web", [self.address.listening.fileno()], patience=8.0)
            self._want(name)
        self._wait("web", lambda: self.children["web"].ready, "the web server")
        answer = self._get("/readyz")
        if answer != 200:
            raise UpError(
                f"the site does not answer: /readyz gave {answer}; see {self.layout.logs / 'web.log'}."
            )
        self.ready = True
        self.status.state = "running"
        self.status.write(list(self.children.values()))
        self.say("pages are served")
        lines = [f"Open {self.address.shown}/"]
        if self._sign_in:
            lines.append(
                f"First sign-in: {self._sign_in[0]} / {self._sign_in[1]}   "
                "(shown only now; it asks for a new password)"
            )
        for row in self._results.get("demo seed", {}).get("people", []):
            lines.append("  ".join(str(cell) for cell in row))
        if self.options.demo:
            lines += _demo_people(self.layout.home / "sign-ins.txt")
        if not self.address.is_local and self.address.shown.startswith("http:"):
            lines.append(
                "Other machines reach it without encryption: put TLS before it (docs/operations.md)."
            )
        print("\n" + "\n".join(lines) + "\n", flush=True)

    def _get(self, path: str, limit: float = 30.0) -> int:
        """HTTP status of a page of ours, 0 without an answer; the loop turns meanwhile."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            with socket.socket(self.address.listening.family, socket.SOCK_STREAM) as client:
                client.settimeout(0.05)
                try:
                    client.connect(self.address.local)
                    host = self.address.local_url.removeprefix("http://")
                    client.sendall(
                        f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
                    )
                except OSError:
                    self._turn(0.1)
                    continue
                answer = b""
                while time.monotonic() < end and b"\r\n" not in answer:
                    if self.stopping:
                        raise Stopped
                    self._turn(0)
                    try:
                        part = client.recv(4096)
                    except TimeoutError:
                        continue
                    except OSError:
                        break
                    if not part:
                        break
                    answer += part
                if answer.startswith(b"HTTP/1.1 ") and answer[9:12].isdigit():
                    return int(answer[9:12])
            self._turn(0.1)
        return 0

    def _rest(self) -> None:
        """What pages do not wait for."""
        self._forked("worker", "worker", [int(os.environ.get("GPUPOOL_WORKER_THREADS", "4"))], patience=15.0)
        self._forked("beat", "beat", [str(self.layout.home / "beat")], patience=3.0)
        self._want("worker", "beat")
        if self._agent_possible:
            self._child("agent", self._agent, patience=10.0, log=self.layout.logs / "agent.log")
            self._want("agent")
        if self.options.demo:
            self._forked(
                "demo fleet", "manage", ["demo_agents", "--url", self.address.local_url], patience=5.0
            )
            # It goes on where it was when it, or what it was forked from, died.
            self._once("demo history", "manage", ["demo_seed", "--stage", "history"], again=5)
            self._want("demo fleet", "demo history")

    def _agent(self) -> Handle:
        """This machine's agent. Its environment holds none of the installation's secrets: jobs inherit from
        it."""
        command = [sys.executable, "-m", "portal.up.this_node", str(self.layout.home / "agent")]
        command.append(self.address.local_url)
        return spawn(
            command,
            log=self.layout.logs / "agent.log",
            environment=agent_environment(),
            cwd=str(BASE_DIR),
            death_signal=signal.SIGTERM,
        )


def _demo_people(path: Path) -> list[str]:
    """The demo's sign-ins, as `demo_seed` wrote them."""
    try:
        return [
            "Sign-ins of the demo:",
            *(f"  {line}" for line in path.read_text().splitlines() if line.strip()),
        ]
    except OSError:
        return []
