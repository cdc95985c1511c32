"""A real Slurm on this machine for tests: controller, accounting, nodes with made-up GPUs, all in one folder.

Several nodes run on one host (`slurmd -N`); a GPU is a character device, so that Slurm sets CUDA_VISIBLE_DEVICES.
Everything listens on the loopback or a socket below the folder, and only what was started here is stopped.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.parts import missing

PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "slurmrestd", "munged", "mariadbd", "sbatch", "sacctmgr")
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
WAIT_S = 240.0
"""Only so that what never comes ends the test: a loaded machine may take minutes to make a database."""

CONF = """\
ClusterName=testbed
SlurmctldHost={host}(127.0.0.1)
SlurmUser={me}
SlurmdUser=root
SlurmctldPort={ctld}
AuthType=auth/munge
AuthInfo=socket={top}/run/munge.sock
CredType=cred/munge
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={top}/etc/jwt.key
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={top}/state
SlurmdSpoolDir={top}/spool/%n
SlurmctldPidFile={top}/run/slurmctld.pid
SlurmdPidFile={top}/run/slurmd-%n.pid
SlurmctldLogFile={top}/log/slurmctld.log
SlurmdLogFile={top}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=30
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000
PriorityType=priority/multifactor
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=1
SlurmdTimeout=300
MessageTimeout=3
MinJobAge=600
GresTypes=gpu
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd}
AccountingStoragePass={top}/run/munge.sock
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
"""
DBD = """\
AuthType=auth/munge
AuthInfo=socket={top}/run/munge.sock
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={top}/etc/jwt.key
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={dbd}
SlurmUser={me}
PidFile={top}/run/slurmdbd.pid
LogFile={top}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
CommunicationParameters=NoInAddrAny
"""


def missing_parts() -> str:
    """What this machine lacks for a Slurm, or ""."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if os.geteuid() != 0:
        lacking.append("root")
    return ", ".join(lacking)


def need_slurm() -> None:
    """Skip where Slurm cannot be had; in CI that is a failure."""
    lacking = missing_parts()
    if lacking:
        missing(f"a real Slurm needs: {lacking}")


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class Testbed:
    """One Slurm. ``up`` once, ``down`` at the end; in between its controller may be stopped and started."""

    __test__ = False

    def __init__(self, top: Path, nodes: int = 3, gpus: int = 4) -> None:
        self.top, self.nodes, self.gpus = top, nodes, gpus
        self.me = getpass.getuser()
        self.host = socket.gethostname().split(".")[0]
        self.ports = _free_ports(2 + nodes)
        self.folder = top / "shared"
        self._started: list[subprocess.Popen[bytes]] = []
        self.environment = {
            "PATH": SYSTEM_PATH,
            "LANG": "C.UTF-8",
            "HOME": str(top),
            "SLURM_CONF": str(self.conf),
        }

    @property
    def conf(self) -> Path:
        return self.top / "etc" / "slurm.conf"

    def run(self, *words: str, stdin: str | None = None, check: bool = True, **more: str) -> str:
        """Run one of Slurm's commands by hand; its output."""
        done = subprocess.run(
            words,
            env={**self.environment, **more},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
        if check and done.returncode:
            raise AssertionError(f"{words}: {done.stderr}")
        return done.stdout

    def _daemon(self, *words: str, **more: str) -> None:
        """Start a daemon in the foreground as our own child: so it can be ended by its id alone."""
        log = (self.top / "log" / f"{words[0]}-{len(self._started)}.out").open("wb")
        self._started.append(
            subprocess.Popen(
                words,
                env={**self.environment, **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.top,
            )
        )

    def wait(self, holds: Callable[[], object], what: str) -> None:
        """Poll until it holds."""
        until = time.monotonic() + WAIT_S
        while not holds():
            if time.monotonic() > until:
                raise AssertionError(f"Slurm's test bed: {what} did not come")
            time.sleep(0.05)

    def answers(self, *words: str) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                words,
                env=self.environment,
                capture_output=True,
                check=False,
                timeout=60,
                stdin=subprocess.DEVNULL,
            )
            return done.returncode == 0
        return False

    # -- up and down --------------------------------------------------------------------------------------

    def up(self) -> None:
        for name in ("etc", "run", "log", "state", "spool", "dev", "munge", "shared"):
            (self.top / name).mkdir(parents=True, exist_ok=True)
        os.chmod(self.top, 0o755)
        self._keys_and_files()
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={self.top}/munge/key",
            f"--socket={self.top}/run/munge.sock",
            f"--pid-file={self.top}/run/munged.pid", f"--log-file={self.top}/log/munged.log",
            f"--seed-file={self.top}/munge/seed",
        )  # fmt: skip
        self._database()
        self.wait((self.top / "run" / "munge.sock").is_socket, "munge")
        socket_file = str(self.top / "run" / "mysql.sock")
        self._daemon("slurmdbd", "-D", MYSQL_UNIX_PORT=socket_file, MARIADB_UNIX_PORT=socket_file)
        self.wait(lambda: self.answers("sacctmgr", "-n", "list", "cluster"), "slurmdbd")
        self.run("sacctmgr", "-i", "add", "cluster", "testbed", check=False)
        for account in ("ml", "vision"):
            self.run(
                "sacctmgr",
                "-i",
                "add",
                "account",
                account,
                f"Description={account}",
                f"Organization={account}",
            )
            self.run("sacctmgr", "-i", "add", "user", self.me, f"account={account}", "DefaultAccount=ml")
        self.start_controller()
        for number in range(1, self.nodes + 1):
            self._daemon("slurmd", "-D", "-N", f"gpu{number}")
        self.wait(lambda: self.idle() >= self.nodes, "nodes")

    def idle(self) -> int:
        said = self.run("sinfo", "-h", "-N", "-p", "batch", "-t", "idle", "-o", "%N", check=False)
        return len(set(said.split()))

    def start_controller(self, empty: bool = False) -> None:
        """Start it; ``empty``: it has lost its state, so that it knows no job any more."""
        self._daemon("slurmctld", "-D", "-c" if empty else "-i")
        self.wait(lambda: self.answers("scontrol", "ping"), "slurmctld")

    def stop_controller(self, how: int = signal.SIGTERM) -> None:
        """End the controller; jobs run on. (By SIGKILL it may lose what it had not written yet.)"""
        self._end("slurmctld", how)

    def halt_controller(self) -> None:
        """Let it hang; ``resume_controller`` lets it go on."""
        self._tell("slurmctld", signal.SIGSTOP)

    def resume_controller(self) -> None:
        """Let a halted controller go on with what it was sent meanwhile."""
        self._tell("slurmctld", signal.SIGCONT)

    def _tell(self, program: str, what: int) -> list[subprocess.Popen[bytes]]:
        found = [one for one in self._started if Path(str(one.args[0])).name == program]  # type: ignore[index]
        for process in found:
            process.send_signal(what)
        return found

    def start_rest(self) -> str:
        """Start slurmrestd on a unix socket; its address."""
        where = self.top / "run" / "rest.sock"
        self._daemon(
            "slurmrestd", "-a", "rest_auth/local", f"unix:{where}", SLURMRESTD_SECURITY="disable_user_check"
        )
        self.wait(where.is_socket, "slurmrestd")
        return f"unix:{where}"

    def _end(self, program: str, how: int) -> None:
        for process in self._tell(program, how):
            process.wait(WAIT_S)
            self._started.remove(process)

    def down(self) -> None:
        with contextlib.suppress(Exception):
            self.run("scancel", f"--user={self.me}", "--signal=KILL", "--full", check=False)
            self.run("scancel", f"--user={self.me}", check=False)
        for program in ("slurmrestd", "slurmctld", "slurmd", "slurmdbd", "mariadbd", "munged"):
            for process in [one for one in self._started if Path(str(one.args[0])).name == program]:  # type: ignore[index]
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(WAIT_S)
                self._started.remove(process)
        self._end_orphans()

    def _end_orphans(self) -> None:
        """Jobs that a controller lost run on under their step daemon: what was started for this Slurm ends with it."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == str(self.conf):
                    process.kill()

    # -- pieces -------------------------------------------------------------------------------------------

    def _keys_and_files(self) -> None:
        for name, size in (("munge/key", 1024), ("etc/jwt.key", 32)):
            path = self.top / name
            path.touch(mode=0o600)
            path.write_bytes(os.urandom(size))
        values = {
            "top": self.top,
            "host": self.host,
            "me": self.me,
            "ctld": self.ports[0],
            "dbd": self.ports[1],
        }
        lines, gres = [CONF.format(**values)], []
        for number in range(1, self.nodes + 1):
            name = f"gpu{number}"
            (self.top / "spool" / name).mkdir(exist_ok=True)
            devices = self.top / "dev" / name
            devices.mkdir(exist_ok=True)
            for index in range(self.gpus):
                os.mknod(devices / f"nvidia{index}", 0o666 | 0o020000, os.makedev(1, 3))
            lines.append(
                f"NodeName={name} NodeHostname={self.host} NodeAddr=127.0.0.1 Port={self.ports[1 + number]} CPUs=32"
                f" RealMemory=65536 Gres=gpu:a100:{self.gpus} Feature=a100 State=UNKNOWN\n"
            )
            gres.append(f"NodeName={name} Name=gpu Type=a100 File={devices}/nvidia[0-{self.gpus - 1}]\n")
        lines.append(
            "PartitionName=batch Nodes=ALL Default=YES MaxTime=7-0 State=UP PriorityTier=10 PreemptMode=REQUEUE\n"
        )
        lines.append("PartitionName=urgent Nodes=ALL MaxTime=1-0 State=UP PriorityTier=100 PreemptMode=OFF\n")
        self.conf.write_text("".join(lines))
        (self.top / "etc" / "gres.conf").write_text("".join(gres))
        (self.top / "etc" / "cgroup.conf").write_text(
            "CgroupAutomount=no\nCgroupPlugin=cgroup/v1\nConstrainDevices=no\n"
        )
        dbd = self.top / "etc" / "slurmdbd.conf"
        dbd.touch(mode=0o600)
        dbd.write_text(DBD.format(**values))

    def _database(self) -> None:
        data, sock = self.top / "mysql", self.top / "run" / "mysql.sock"
        quiet: Sequence[str] = ("--no-defaults", f"--user={self.me}", f"--datadir={data}")
        self.run("mariadb-install-db", *quiet, "--auth-root-authentication-method=socket", "--skip-test-db")
        self._daemon(
            "mariadbd", *quiet, f"--socket={sock}", "--skip-networking", f"--pid-file={self.top}/run/mariadbd.pid",
            "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--innodb-lock-wait-timeout=900",
            "--innodb-flush-log-at-trx-commit=0", "--skip-log-bin",
        )  # fmt: skip
        admin = ("mariadb-admin", "--no-defaults", "-S", str(sock), "-u", "root", "ping")
        self.wait(lambda: self.answers(*admin), "mariadbd")
        self.run(
            "mariadb", "--no-defaults", "-S", str(sock), "-u", "root", "-e",
            "CREATE DATABASE slurm_acct; CREATE USER slurm@localhost IDENTIFIED BY 'slurm';"
            " GRANT ALL ON slurm_acct.* TO slurm@localhost;",
        )  # fmt: skip
