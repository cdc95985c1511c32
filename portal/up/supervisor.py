"""Starts the whole installation, keeps it running, and stops it in order. One thread, one loop, no Django."""

import contextlib
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portal.up.accounts import service_account
from portal.up.address import Address, listen
from portal.up.binaries import valkey_server
from portal.up.errors import UpError
from portal.up.forks import Forks
from portal.up.layout import BASE_DIR, Layout, load_secrets
from portal.up.postgres import EmbeddedPostgres
from portal.up.process import Child, Handle, describe_exit, rotate, spawn
from portal.up.status import StatusFile, end_leftovers
from portal.up.valkey import EmbeddedValkey

TICK_SECONDS = 0.5
START_LIMIT_SECONDS = 120.0
FIRST_LOGIN = "admin"
# Stopped from the top down: who asks before who answers, the database last.
STOP_ORDER = (
    ("demo history", "demo fleet", "agent"),
    ("beat",),
    ("worker", "web"),
    ("fork",),
    ("valkey",),
    ("postgres",),
)


@dataclass(frozen=True)
class Options:
    """What the command line said."""

    root: Path
    demo: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    agent: bool = True


class Stopped(Exception):
    """A signal asked to stop while something was being waited for."""


class Supervisor:
    """One run of an installation."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.layout = Layout(options.root, options.demo)
        self.children: dict[str, Child] = {}
        self.stopping = False
        self.ready = False
        self.started = time.monotonic()
        self._results: dict[str, dict[str, Any]] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    # -- talking ------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """A line of progress on standard output."""
        with contextlib.suppress(BrokenPipeError, OSError):
            print(f"  {time.monotonic() - self.started:5.1f} s  {text}", flush=True)

    def warn(self, process: str, text: str) -> None:
        """A line on standard error, kept in status.json too."""
        with contextlib.suppress(BrokenPipeError, OSError):
            print(f"up: {process} {text}", file=sys.stderr, flush=True)
        self.status.incident(process, text)

    # -- the run ------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Start everything, keep it until a signal, stop it. UpError where it cannot start."""
        self.layout.prepare()
        self.lock = self.layout.lock()
        self.address: Address = listen(self.options.host, self.options.port)
        self.status = StatusFile(self.layout.status_file, address=self.address.shown, demo=self.options.demo)
        self._signals()
        what = "demo" if self.options.demo else "installation"
        print(f"Starting the {what} in {self.layout.home} (Ctrl-C stops it).", flush=True)
        try:
            self._take_over()
            self._start()
            self._keep()
        except Stopped:
            pass
        finally:
            self._stop()
        return 0

    def _signals(self) -> None:
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, self._asked_to_stop)

    def _asked_to_stop(self, *_: Any) -> None:
        if self.stopping:  # asked twice: no more patience
            for child in self.children.values():
                child.signal(signal.SIGQUIT if child.name == "postgres" else signal.SIGKILL)
        self.stopping = True

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
        self.environment = self._environment(keys)
        self.forks = Forks(
            log=self.layout.logs / "fork.log",
            environment=self.environment,
            inherited=(self.address.listening.fileno(),),
            on_report=self._reported,
        )
        database = self._plan_servers(keys)
        self._child("fork", self.forks.start, patience=3.0)
        self._want("fork")
        if database:
            self._start_database(database)
        if self.valkey:
            self._wait("valkey", self.valkey.is_ready, "Valkey")
            self.children["valkey"].ready = True
        self._wait("fork", lambda: self.forks.loaded, "the site")
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
            self.environment["DATABASE_URL"] = self._given_database(given_database)
            self.say("database: the given DATABASE_URL")
        else:
            database = EmbeddedPostgres.of(self.layout, keys)
            database.account.give(self.layout.postgres)
            database.account.give(self.layout.sockets)
            self.environment["DATABASE_URL"] = database.url(self.layout.database)
        if given_redis:
            self.environment["REDIS_URL"] = _other_number(given_redis) if self.options.demo else given_redis
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

    def _given_database(self, url: str) -> str:
        """The given URL; a demo uses another database beside it, which the site's start makes."""
        if not self.options.demo:
            return url
        head, _, query = url.partition("?")
        return f"{head.rpartition('/')[0]}/{self.layout.database}" + (f"?{query}" if query else "")

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
            "login": FIRST_LOGIN,
            "password": password,
            "agent_state": str(self.layout.home / "agent"),
        }
        self._once("prepare", "prepare", [what])
        self._run_once("prepare", "the database could not be brought up to date")
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
        print("\n" + "\n".join(lines) + "\n", flush=True)

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
            self._once("demo history", "manage", ["demo_seed", "--stage", "history"])
            self._want("demo fleet", "demo history")

    def _agent(self) -> Handle:
        """This machine's agent. Its environment holds none of the installation's secrets: jobs inherit from
        it."""
        ours = ("GPUPOOL_", "DATABASE_URL", "REDIS_URL", "DJANGO_", "PG")
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(ours) or k.startswith("GPUPOOL_AGENT")
        }
        environment["PYTHONUNBUFFERED"] = "1"
        command = [sys.executable, "-m", "portal.up.this_node", str(self.layout.home / "agent")]
        command.append(self.address.local_url)
        return spawn(
            command,
            log=self.layout.logs / "agent.log",
            environment=environment,
            cwd=str(BASE_DIR),
            death_signal=signal.SIGTERM,
        )

    def _environment(self, keys: dict[str, str]) -> dict[str, str]:
        """The environment of the site's processes: what the person set, and what follows from the folder."""
        environment = dict(os.environ)
        environment.update(
            GPUPOOL_DATA_DIR=str(self.layout.home),
            GPUPOOL_STATUS_FILE=str(self.layout.status_file),
            GPUPOOL_BASE_URL=self.address.shown,
            DJANGO_SETTINGS_MODULE="portal.settings",
        )
        if self.options.demo:
            environment["GPUPOOL_DEMO"] = "1"
        else:
            environment.pop("GPUPOOL_DEMO", None)
        environment.setdefault("GPUPOOL_ENV", "production")
        environment.setdefault("GPUPOOL_SECRET_KEY", keys["secret_key"])
        environment.setdefault("GPUPOOL_ALLOWED_HOSTS", self.address.allowed_hosts())
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")
        environment.setdefault("MALLOC_ARENA_MAX", "2")
        return environment

    # -- children -----------------------------------------------------------------------------------------

    def _child(self, name: str, start: Callable[[], Handle | None], **more: Any) -> Child:
        more.setdefault("log", self.layout.logs / f"{name.replace(' ', '-')}.log")
        child = self.children[name] = Child(name, start, **more)
        return child

    def _forked(self, name: str, role: str, arguments: list[Any], **more: Any) -> Child:
        log = self.layout.logs / f"{name.replace(' ', '-')}.log"

        def start() -> Handle | None:
            return self.forks.fork(role, arguments, log=log, name=name, death_signal=signal.SIGKILL)

        return self._child(name, start, log=log, **more)

    def _once(self, name: str, role: str, arguments: list[Any]) -> None:
        self._forked(name, role, arguments, once=True, patience=5.0)

    def _want(self, *names: str) -> None:
        for name in names:
            self.children[name].wanted = True
        self._turn(0)

    def _run_once(self, name: str, failure: str) -> None:
        """Run a `once` child to its end; UpError with its last words where it failed."""
        child = self.children[name]
        self._want(name)
        self._until(lambda: not child.wanted and child.handle is None, limit=600.0)
        if child.last_exit != 0:
            words = child.last_lines(1)
            raise UpError(
                f"{failure}: {words[0] if words else describe_exit(child.last_exit or 0)} (see {child.log})"
            )
        del self.children[name]

    def _reported(self, name: str, message: dict[str, Any]) -> None:
        if message.get("ready") and name in self.children:
            self.children[name].ready = True
        if "say" in message:
            self.say(f"{name}: {message['say']}")
        self._results.setdefault(name, {}).update(message)

    # -- the loop -----------------------------------------------------------------------------------------

    def _turn(self, timeout: float) -> None:
        """Wait for news at most so long, then look at every child and start what is due."""
        waiting: list[int] = [self._wake_read]
        control = self.forks.fileno() if hasattr(self, "forks") else None
        if control is not None:
            waiting.append(control)
        with contextlib.suppress(InterruptedError):
            select.select(waiting, [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        if control is not None:
            self.forks.pump()
        now = time.monotonic()
        for child in list(self.children.values()):
            code = child.check(now)
            if code is not None:
                self._ended(child, code)
            if not self.stopping:
                child.begin(now)
        self._mark_ready(now)
        self.status.write(list(self.children.values()))

    def _mark_ready(self, now: float) -> None:
        """Programs that do not report count as ready when they have run for a second."""
        for child in self.children.values():
            if child.handle and not child.ready and now - child.started_at > 1.0 and self.ready:
                child.ready = child.name in ("postgres", "valkey", "agent") or (
                    child.name == "fork" and self.forks.loaded
                )

    def _ended(self, child: Child, code: int) -> None:
        if child.name == "fork":
            self.forks.close()
            if not self.stopping:
                for other in self.children.values():
                    other.check(time.monotonic())
        if self.stopping or (child.once and code == 0):
            return
        text = describe_exit(code)
        if child.once and not self.ready:  # the start fails with this, and says so
            self.status.incident(child.name, text)
        elif child.once:
            self.warn(child.name, f"{text}; see {child.log}")
        elif child.wanted:
            self.warn(child.name, f"{text}; starting it again in {child.pause:g} s (see {child.log})")

    def _until(self, done: Callable[[], bool], *, limit: float = START_LIMIT_SECONDS) -> bool:
        """Turn the loop until something is so; Stopped when a signal came; False when the time is over."""
        end = time.monotonic() + limit
        while not done():
            if self.stopping:
                raise Stopped
            if time.monotonic() > end:
                return False
            self._turn(0.02)
        return True

    def _wait(self, name: str, done: Callable[[], bool], title: str) -> None:
        """Wait for a child during the start; UpError with its last words where it keeps ending."""
        child = self.children[name]
        came = self._until(lambda: done() or child.restarts >= 3)
        if not came or not done():
            words = child.last_lines(1)
            raise UpError(f"{title} does not start: {words[0] if words else 'no answer'} (see {child.log})")

    def _keep(self) -> None:
        """Run until a signal."""
        last_rotation = time.monotonic()
        while not self.stopping:
            self._turn(TICK_SECONDS if self._restless() else 5.0)
            if time.monotonic() - last_rotation > 60.0:
                last_rotation = time.monotonic()
                for log in self.layout.logs.glob("*.log"):
                    rotate(log)

    def _restless(self) -> bool:
        return any(c.wanted and (c.handle is None or not c.ready) for c in self.children.values())

    def _get(self, path: str, limit: float = 30.0) -> int:
        """HTTP status of a page of ours, 0 without an answer; the loop turns meanwhile."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            with socket.socket(self.address.listening.family, socket.SOCK_STREAM) as client:
                client.settimeout(0.05)
                try:
                    client.connect(self.address.local)
                    host = f"127.0.0.1:{self.address.port}"
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

    # -- stopping -----------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Stop every child in order, with patience and then without; the last word is in status.json."""
        self.stopping = True
        self.status.state = "stopping"
        for child in self.children.values():
            child.wanted = False
        if self.ready:
            print("Stopping.", flush=True)
        known = {name for group in STOP_ORDER for name in group}
        others = tuple(name for name in self.children if name not in known)
        for group in (others, *STOP_ORDER):
            members = [self.children[n] for n in group if n in self.children and self.children[n].handle]
            for child in members:
                child.signal(child.stop_signal)
            self._await_end(members)
        self.status.state = "stopped"
        self.status.write(list(self.children.values()))
        if self.ready:
            self.say("stopped; the data stay in the folder")

    def _await_end(self, members: list[Child]) -> None:
        began = time.monotonic()
        while any(child.handle for child in members):
            self._turn(0.02)
            waited = time.monotonic() - began
            for child in members:
                if child.handle and waited > child.patience:
                    hard = (
                        signal.SIGQUIT
                        if child.name == "postgres" and waited < child.patience + 5
                        else signal.SIGKILL
                    )
                    child.signal(hard)


def _other_number(url: str) -> str:
    """The same Redis server with the next database number."""
    import re

    if url.startswith("unix:"):
        head, _, query = url.partition("?")
        found = re.search(r"(?:^|&)db=(\d+)", query)
        return f"{head}?db={int(found.group(1)) + 1 if found else 1}"
    found = re.search(r"/(\d+)$", url)
    return f"{url[: found.start()]}/{int(found.group(1)) + 1}" if found else url.rstrip("/") + "/1"


def _demo_people(path: Path) -> list[str]:
    """The demo's sign-ins, as `demo_seed` wrote them."""
    try:
        return [
            "Sign-ins of the demo:",
            *(f"  {line}" for line in path.read_text().splitlines() if line.strip()),
        ]
    except OSError:
        return []
