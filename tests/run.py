#!/usr/bin/env python3
"""Every check of the project in one command: `python tests/run.py`.

Makes `.venv` in the checkout where this does not run in it yet, installs what is missing (Python packages
with pip; on Debian as root also a browser, fonts, gettext, compilers and etcd), then runs lint, types, import
contracts, template lint, migrations, translations and all tests on an embedded PostgreSQL and Valkey, and the
database tests once more on this machine's own PostgreSQL and Redis where they answer. A real Kubernetes control plane
for its tests is built from Debian's source beside the other steps, once: it is kept in the user's cache folder.
Steps that wait more than they compute run side by side, each with servers of its own; what they say is kept apart and
shown whole when each has ended. Runs every step even after a failure; the exit code is 0 only if all passed. With
CI=true a missing part is a failure, elsewhere it is reported as not run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
SHARED = ROOT.parent / "shared"
IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
STEP_LIMIT_SECONDS = 40 * 60
SLURM_PLUGINS = f"/usr/lib/{os.uname().machine}-linux-gnu/slurm-wlm"
# (what to look for, Debian package)
SYSTEM_PARTS = (
    ("chromium", "chromium"),
    ("msgfmt", "gettext"),
    ("gcc", "gcc"),
    ("/usr/include/stdio.h", "libc6-dev"),
    ("slurmctld", "slurmctld"),
    ("slurmd", "slurmd"),
    ("sbatch", "slurm-client"),
    ("slurmdbd", "slurmdbd"),
    ("slurmrestd", "slurmrestd"),
    ("munged", "munge"),
    (f"{SLURM_PLUGINS}/select_cons_tres.so", "slurm-wlm-basic-plugins"),
    (f"{SLURM_PLUGINS}/auth_jwt.so", "slurm-wlm-jwt-plugin"),
    ("mariadbd", "mariadb-server"),
    ("/usr/share/fonts/opentype/noto/NotoSansCJK-Regular.ttc", "fonts-noto-cjk"),
    ("etcd", "etcd-server"),
)
OUTSIDE_POSTGRES = "postgres://postgres@127.0.0.1:5432/gpupool_check"
OUTSIDE_REDIS = "redis://127.0.0.1:6379/8"
# What the second database and Redis are tried with: all that talks to them.
DATABASE_TESTS = (
    *("*/services", "*/live", "*/selectors", "*/executors"),
    *("quotas/money", "portal/accounts", "portal/ops", "portal/notify"),
)
WITH_DATABASE = (
    *("system checks", "migrations", "translations"),
    *(f"tests{part}" for part in ("", " serial", " up", " browser", " outside servers", " kubernetes")),
)


@dataclass
class Outcome:
    """One step's end: ok, failed or not run, with a word on it."""

    name: str
    state: str
    seconds: float = 0.0
    note: str = ""


@dataclass
class Step:
    """One command to be run under a name."""

    name: str
    command: list[str]
    environment: dict[str, str] | None = None

    def announced(self) -> str:
        return f"\n== {self.name}: {' '.join(_short(word) for word in self.command)}"


@dataclass
class Run:
    """All steps and their outcomes; `counts` adds up what the test runs said."""

    only: list[str]
    fast: bool
    outcomes: list[Outcome] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"passed": 0, "failed": 0, "skipped": 0})

    def wants(self, name: str) -> bool:
        return not self.only or any(word in name for word in self.only)

    def missing(self, name: str, note: str) -> None:
        """A part that cannot be had: a failure in CI, a remark elsewhere."""
        self.outcomes.append(Outcome(name, "failed" if IN_CI else "not run", note=note))
        print(f"-- {name}: {'MISSING' if IN_CI else 'not run'}: {note}", flush=True)

    def step(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Run a command as a step, its output shown as it comes."""
        if not self.wants(name):
            return
        step = Step(name, command, environment)
        print(step.announced(), flush=True)
        began = time.monotonic()
        code, lines = _stream(command, environment)
        self._ended(step, code, lines, time.monotonic() - began)

    def side_by_side(self, *lanes: list[Step]) -> None:
        """Run the steps of each lane one after the other, the lanes beside each other. A step's output is shown whole
        when it has ended."""
        waiting = [[step for step in lane if self.wants(step.name)] for lane in lanes]
        waiting = [lane for lane in waiting if lane]
        if len(waiting) == 1:
            for step in waiting[0]:
                self.step(step.name, step.command, step.environment)
            return
        running: dict[int, Beside] = {}
        told = time.monotonic()
        try:
            while running or any(waiting):
                for number, lane in enumerate(waiting):
                    if lane and number not in running:
                        running[number] = Beside(lane.pop(0))
                        print(running[number].step.announced() + "  (beside others)", flush=True)
                time.sleep(0.2)
                for number, beside in list(running.items()):
                    code = beside.poll()
                    if code is not None:
                        lines = beside.close()
                        del running[number]
                        print(
                            f"\n== {beside.step.name} has ended; it said:\n{''.join(lines)}",
                            end="",
                            flush=True,
                        )
                        self._ended(beside.step, code, lines, beside.seconds)
                if time.monotonic() - told > 60:
                    told = time.monotonic()
                    words = [f"{each.step.name} {each.seconds:.0f} s" for each in running.values()]
                    print(f"-- under way: {', '.join(words)}", flush=True)
        finally:
            for beside in running.values():
                beside.close()

    def _ended(self, step: Step, code: int, lines: list[str], seconds: float) -> None:
        note = ""
        if "pytest" in step.command:
            note = self._count(lines)
            if code == 5:  # nothing selected
                self.outcomes.append(Outcome(step.name, "not run", seconds, "no tests there"))
                return
        self.outcomes.append(
            Outcome(step.name, "ok" if code == 0 else "failed", seconds, note or f"exit code {code}")
        )

    def _count(self, lines: list[str]) -> str:
        for line in reversed(lines):
            found = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", line)}
            if found:
                self.counts["passed"] += found.get("passed", 0)
                self.counts["failed"] += sum(found.get(word, 0) for word in ("failed", "error", "errors"))
                self.counts["skipped"] += found.get("skipped", 0)
                return line.strip("= \n")
        return ""

    def summary(self) -> int:
        """Print all outcomes and the totals; the exit code."""
        print("\n== summary", flush=True)
        for outcome in self.outcomes:
            print(f"{outcome.state:>8}  {outcome.name:<28} {outcome.seconds:6.1f} s  {outcome.note}")
        failed = [outcome for outcome in self.outcomes if outcome.state == "failed"]
        total = self.counts
        print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
        if failed:
            print("FAILED: " + ", ".join(outcome.name for outcome in failed), flush=True)
        return 1 if failed else 0


def _short(word: str) -> str:
    return Path(word).name if word.startswith(str(VENV)) else word


def _start(command: list[str], environment: dict[str, str] | None, output: Any) -> subprocess.Popen[str]:
    """The command in a process group of its own."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Beside:
    """A step that runs beside another, up to the time limit, its output kept in a file until it has ended."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.began = time.monotonic()
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `close`
        self.process = _start(step.command, step.environment, self.output)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        if self.process.poll() is None and self.seconds > STEP_LIMIT_SECONDS:
            print(f"-- {self.step.name}: over {STEP_LIMIT_SECONDS} s: ended", flush=True)
            _end_group(self.process)
            self.process.wait()
        return self.process.poll()

    def close(self) -> list[str]:
        """End what is left of it; the lines that it said."""
        _end_group(self.process)
        self.process.wait()
        with self.output as file:
            file.seek(0)
            return file.readlines()


def _stream(command: list[str], environment: dict[str, str] | None) -> tuple[int, list[str]]:
    """Run to the end or the time limit, echoing output; the exit code and the lines. Its group is ended with
    it."""
    process = _start(command, environment, subprocess.PIPE)

    def too_long(*_: object) -> None:
        print(f"-- over {STEP_LIMIT_SECONDS} s: ended", flush=True)
        _end_group(process)

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(STEP_LIMIT_SECONDS)
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
        return process.wait(), lines
    finally:
        signal.alarm(0)
        _end_group(process)


# -- what must be there ---------------------------------------------------------------------------------


def enter_environment() -> None:
    """Go on inside `.venv`, made where it is missing."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is what an old Python is shown
        sys.exit(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}.")
    if Path(sys.prefix).resolve() == VENV.resolve():
        return
    python = VENV / "bin" / "python"
    if not python.exists():
        print("== making .venv", flush=True)
        venv.create(VENV, with_pip=True, symlinks=True)
    sys.stdout.flush()
    os.execv(python, [str(python), str(Path(__file__).resolve()), *sys.argv[1:]])


def install_packages(run: Run) -> bool:
    """pip install, once for each state of pyproject.toml."""
    stamp = VENV / ".installed"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return True
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Most of what is installed is never imported: what is, is compiled then.
    later = [] if sys.dont_write_bytecode else ["--no-compile"]
    command = [*pip, *later, "-e", ".[test]"]
    for attempt in (1, 2):
        print(f"\n== packages: pip install -e .[test]{' (again)' if attempt == 2 else ''}", flush=True)
        began = time.monotonic()
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            stamp.write_text(wanted)
            run.outcomes.append(Outcome("packages", "ok", time.monotonic() - began))
            return True
        print(answer.stdout + answer.stderr, flush=True)
    run.outcomes.append(Outcome("packages", "failed", note="pip install failed"))
    return False


def install_torch(run: Run) -> None:
    """What the test of a gang runs, once: large, so that its lack is a remark of its own."""
    if importlib.util.find_spec("torch") is not None:
        return
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-e",
        ".[gang]",
    ]
    print("\n== packages: pip install -e .[gang]", flush=True)
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        run.outcomes.append(Outcome("packages of the gang", "ok", time.monotonic() - began))
    else:
        run.missing("packages of the gang", "torch could not be installed (pip install -e .[gang])")


def _has(part: str) -> bool:
    return Path(part).exists() if part.startswith("/") else shutil.which(part) is not None


def install_system_parts(run: Run) -> None:
    """Debian packages that the tests use, where this may install them."""
    from tests.native import k8s

    parts = SYSTEM_PARTS if run.fast or k8s.built() else (*SYSTEM_PARTS, *k8s.BUILD_PARTS)
    wanted = [package for part, package in parts if not _has(part)]
    if not wanted:
        return
    began = time.monotonic()
    if os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        for _attempt in (1, 2):
            print(f"\n== system parts: {' '.join(wanted)}", flush=True)
            _stream(["apt-get", "update", "-qq"], environment)
            command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *wanted]
            if _stream(command, environment)[0] == 0:
                break
    still = [package for part, package in parts if not _has(part)]
    if still:
        run.missing("system parts", f"{', '.join(still)} (install with apt)")
    else:
        run.outcomes.append(Outcome("system parts", "ok", time.monotonic() - began))


@contextlib.contextmanager
def building_kubernetes(run: Run) -> Iterator[Callable[[], None]]:
    """Builds the Kubernetes programs of the tests beside everything else, at the lowest priority, where they are not
    there yet; gives what waits for them. A build that is still under way ends with this."""
    from tests.native import k8s

    if run.fast or not run.wants("tests kubernetes") or not k8s.can_build():
        yield lambda: None
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpupool-k8s-") as folder:
        output = Path(folder) / "build.out"
        process = k8s.build_in_background(output)

        def wait() -> None:
            if process is None:
                return
            print("\n== kubernetes programs: waiting for their build", flush=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(k8s.PATIENCE_S)
            if process.returncode == 0:
                run.outcomes.append(Outcome("kubernetes programs", "ok", time.monotonic() - began, "built"))
            else:
                print("".join(output.read_text(errors="replace").splitlines(keepends=True)[-40:]), flush=True)
                run.missing("kubernetes programs", "tests/native/k8s_build.sh did not come to its end")

        try:
            yield wait
        finally:
            if process is not None and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


# -- the steps ------------------------------------------------------------------------------------------


def static_checks(run: Run) -> None:
    """What needs no database."""
    tool = str(VENV / "bin") + "/"
    run.step("lint", [tool + "ruff", "check", "."])
    run.step("format", [tool + "ruff", "format", "--check", "--quiet", "."])
    run.step("contracts", [tool + "lint-imports", "--no-logo"])
    run.step("templates", [tool + "djlint", "templates", "--lint", "--quiet"])
    if not run.fast:
        run.step("types", [tool + "mypy", "portal", "quotas", "pool", "monitoring"])


def project_checks(run: Run, environment: dict[str, str]) -> None:
    """What Django knows: system checks, missing migrations, translations."""
    manage = [sys.executable, "manage.py"]
    run.step("system checks", [*manage, "check", "--fail-level", "WARNING"], environment)
    run.step("migrations", [*manage, "makemigrations", "--check", "--dry-run"], environment)
    run.step("translations", [*manage, "messages", "--check"], environment)


def _pytest(*words: str, marked: str) -> list[str]:
    without_shared = "" if SHARED.is_dir() else " and not shared"
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--durations=25"]
    return [*command, *words, "-m", marked + without_shared]


def all_tests(run: Run, first: dict[str, str], second: dict[str, str], built: Callable[[], None]) -> None:
    """The whole suite in its parts. Two lanes, each on a pair of its own: what runs agents and installations, of which
    there is one on a machine; and pages, then the outside servers. The one on a real control plane last, since its
    programs may still be built."""
    if not SHARED.is_dir():
        run.missing(
            "tests on ../shared", "the folder ../shared is not there: tests marked `shared` did not run"
        )
    # The pair is new, so the first run makes the test database and the later ones take it as it is.
    plain = _pytest(
        *("--reuse-db", "-n", "2", "--dist", "loadfile"), marked="not serial and not browser and not up"
    )
    run.step("tests", plain, first)
    serial = _pytest("--reuse-db", marked="serial and not kubernetes and not browser and not up")
    agents = [Step("tests serial", serial, first)]
    pages = []
    if not run.fast:
        agents.append(Step("tests up", _pytest("--reuse-db", "tests/up", marked="up"), first))
        pages.append(Step("tests browser", _pytest("--reuse-db", "tests/browser", marked="browser"), second))
        pages += outside_tests(run)
    run.side_by_side(agents, pages)
    if not run.fast and run.wants("tests kubernetes"):
        built()
        run.step(
            "tests kubernetes", _pytest("--reuse-db", "tests/pool/executors", marked="kubernetes"), first
        )


def tests_with_database(run: Run, kubernetes_built: Callable[[], None]) -> None:
    """What needs a database, on pairs of its own."""
    if any(run.wants(name) for name in WITH_DATABASE):
        with _own_pair() as first, _own_pair() as second:
            project_checks(run, first)
            all_tests(run, first, second, kubernetes_built)


@contextlib.contextmanager
def _own_pair() -> Iterator[dict[str, str]]:
    """What leads tests to an embedded PostgreSQL and Valkey and a data folder of their own."""
    from portal.up.layout import Layout
    from portal.up.pair import running_pair

    with tempfile.TemporaryDirectory(prefix="gpupool-tests-") as folder:
        Path(folder).chmod(0o755)
        # Tests throw their database away, so it need not wait for the disk.
        with running_pair(Layout(Path(folder) / "pair"), settings={"fsync": "off"}) as pair:
            (Path(folder) / "data" / "static").mkdir(parents=True)
            yield {**pair.environment, "GPUPOOL_ENV": "test", "GPUPOOL_DATA_DIR": f"{folder}/data"}


def outside_tests(run: Run) -> list[Step]:
    """The tests that talk to a database, on this machine's own PostgreSQL and Redis."""
    name = "tests outside servers"
    if not run.wants(name):
        return []
    if not (_answers(5432) and _answers(6379)):
        run.outcomes.append(Outcome(name, "not run", note="no PostgreSQL or Redis answers on 127.0.0.1"))
        return []
    folders = sorted(
        {str(p.relative_to(ROOT)) for g in DATABASE_TESTS for p in (ROOT / "tests").glob(g) if p.is_dir()}
    )
    environment = {"DATABASE_URL": OUTSIDE_POSTGRES, "REDIS_URL": OUTSIDE_REDIS, "GPUPOOL_ENV": "test"}
    command = _pytest(
        *("--create-db", "-n", "2", "--dist", "loadfile"), marked="not serial and not browser and not up"
    )
    return [Step(name, [*command, *folders], environment)]


def main() -> int:
    """Run it all; see the module's text."""
    parser = argparse.ArgumentParser(description="Run every check of the project.")
    parser.add_argument(
        "--fast", action="store_true", help="without types, browser, `up` and outside servers"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="only steps whose name has WORD"
    )
    arguments = parser.parse_args()
    enter_environment()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path.insert(0, str(ROOT))
    os.environ.pop("DJANGO_SETTINGS_MODULE", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with it
    run = Run(arguments.only, arguments.fast)
    if not install_packages(run):
        return run.summary()
    install_system_parts(run)
    if not run.fast and run.wants("tests serial"):
        install_torch(run)
    with building_kubernetes(run) as kubernetes_built:
        static_checks(run)
        tests_with_database(run, kubernetes_built)
    return run.summary()


if __name__ == "__main__":
    sys.exit(main())
