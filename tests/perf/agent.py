"""What the agent costs: a job started by it against the same command by hand, and sampling eight GPUs each second.

The real zipapp runs against a small server that speaks the protocol, with the fake NVML under it (which reads its
state file at every call, so that a real library is cheaper).

A shared machine makes the same job twice as long from one minute to the next, so a job is not timed as a whole. What
the agent adds has two parts, each told: the wait of the person from the order leaving the server to the end arriving
there, for a command that does nothing, less the same by hand; and the pace of the work itself, which the job measures
piece by piece and of which the fast tenth is compared, turns by hand and by the agent in turn. The
overhead is that of both for a job of five seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

from pool.agent import build, config, procs

NATIVE = Path(__file__).resolve().parents[1] / "native" / "fake_nvml.c"
WORK = """
import sys, time
pieces, n = [], 0
end = time.perf_counter() + float(sys.argv[2])
while time.perf_counter() < end:
    began = time.perf_counter()
    for i in range(40_000):
        n += i * i % 7
    pieces.append(time.perf_counter() - began)
open(sys.argv[1], "w").write("\\n".join(map(str, pieces)))
"""
GPUS, PAIRS, TRIFLES, SAMPLE_SECONDS, TURN_SECONDS, JOB_SECONDS = 8, 10, 30, 30.0, 2.0, 5.0


class Server:
    """The least that an agent needs of an installation: welcome, acknowledgements, orders."""

    def __init__(self, account: str | None) -> None:
        self.account = account
        self.socket: ServerConnection | None = None
        self.ended: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.batches = 0

    async def handle(self, socket: ServerConnection) -> None:
        async for text in socket:
            message = json.loads(text)
            if message["t"] == "hello":
                self.socket = socket
                welcome = {"t": "welcome", "node_uid": "n", "heartbeat_s": 5, "sample_s": 1, "accounts": {}}
                await socket.send(json.dumps(welcome))
            if "seq" in message:
                await socket.send(json.dumps({"t": "ack", "seq": message["seq"]}))
            self.batches += message["t"] == "samples"
            if message["t"] == "job" and message["state"] in ("exited", "failed_start"):
                self.ended[message["allocation"]].set_result(message)

    async def run(self, allocation: str, argv: list[str]) -> tuple[float, dict[str, Any]]:
        """Seconds from the order to the report of its end."""
        assert self.socket is not None
        self.ended[allocation] = asyncio.get_running_loop().create_future()
        spec = {"argv": argv, "gpu_uuids": [], "charge_milli": 0, "system_account": self.account}
        order = {"t": "start", "command": allocation, "allocation": allocation, "member": 0, "spec": spec}
        began = time.monotonic()
        await self.socket.send(json.dumps(order))
        answer = await asyncio.wait_for(self.ended[allocation], 120)
        return time.monotonic() - began, answer


def _cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _resident_mb(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def _by_hand(argv: list[str], account: str | None) -> float:
    more: dict[str, Any] = {}
    if account:
        entry = pwd.getpwnam(account)
        more = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    began = time.monotonic()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, cwd="/", **more)
    return time.monotonic() - began


async def _measure(folder: Path) -> dict[str, Any]:
    account = "nobody" if os.geteuid() == 0 else None
    python = sys.executable if account is None else shutil.which("python3", path="/usr/bin:/bin") or "python3"
    library = folder / "libnvidia-ml.so.1"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O2",
        "-Wl,-soname,libnvidia-ml.so.1",
        "-o",
        str(library),
        str(NATIVE),
    ]
    subprocess.run([*command, "-lpthread"], check=True)
    lines = [f"count={GPUS}"] + [f"gpu.{i}.util={i * 10}" for i in range(GPUS)]
    (folder / "nvml.txt").write_text("\n".join(lines) + "\n")
    program = folder / "agent.pyz"
    program.write_bytes(build.build())
    server = Server(account)
    async with serve(server.handle, "127.0.0.1", 0, max_size=None) as listening:
        port = listening.sockets[0].getsockname()[1]
        state = str(folder / "state")
        config.prepare(state)
        address = f"ws://127.0.0.1:{port}/"
        config.save(state, config.Config(url="http://x", ws_url=address, token="t", node_uid="n"))
        environment = {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(folder),
            "GPUPOOL_KMSG": "/dev/null",
        }
        environment["FAKE_NVML_FILE"] = str(folder / "nvml.txt")
        agent = subprocess.Popen(
            [sys.executable, str(program), "--state", state, "--log-level", "ERROR", "run"], env=environment
        )
        try:
            while server.batches < 5:
                await asyncio.sleep(0.2)
            pids = [agent.pid, *procs.descendants(agent.pid)]
            batches, before, began = server.batches, _cpu_seconds(pids), time.monotonic()
            await asyncio.sleep(SAMPLE_SECONDS)
            seconds = time.monotonic() - began
            core = (_cpu_seconds(pids) - before) / seconds * 100
            sampled = (server.batches - batches) / seconds
            memory = _resident_mb(pids)
            return {"core": core, "sampled": sampled, "memory": memory} | await _jobs(
                server, python, account, folder
            )
        finally:
            agent.terminate()
            agent.wait(15)


async def _jobs(server: Server, python: str, account: str | None, folder: Path) -> dict[str, Any]:
    """The two parts of what the agent adds to a job: milliseconds around it, and its pace (seconds a piece)."""
    results = folder / "results"
    results.mkdir()
    results.chmod(0o777)

    async def by_agent(name: str, argv: list[str]) -> float:
        seconds, answer = await server.run(name, argv)
        if answer["exit_code"] != 0:
            raise RuntimeError(f"the job failed: {answer}")
        return seconds

    for number in range(PAIRS):
        for who in ("hand", "ours") if number % 2 else ("ours", "hand"):
            argv = [python, "-c", WORK, str(results / f"{who}-{number}"), str(TURN_SECONDS)]
            await (
                by_agent(f"job-{number}", argv)
                if who == "ours"
                else asyncio.to_thread(_by_hand, argv, account)
            )
    idle = ["/bin/true"]
    ours, hand = list[float](), list[float]()
    for number in range(TRIFLES):
        hand.append(await asyncio.to_thread(_by_hand, idle, account))
        ours.append(await by_agent(f"idle-{number}", idle))
    return {
        "short": statistics.median(ours),
        "around": statistics.median(ours) - statistics.median(hand),
        **{who: _fast_tenth(results.glob(f"{who}-*")) for who in ("hand", "ours")},
    }


def _fast_tenth(files: Iterable[Path]) -> float:
    pieces = [float(line) for file in files for line in file.read_text().splitlines()]
    return statistics.quantiles(pieces, n=10)[0]


def run() -> dict[str, Any]:
    """Overheads in percent, with the times they come from."""
    folder = Path(tempfile.mkdtemp(prefix="gpupool-perf-agent-"))
    folder.chmod(0o755)
    try:
        got = asyncio.run(_measure(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    pace = (got["ours"] / got["hand"] - 1) * 100
    return {
        "sizes": {
            "gpus": GPUS,
            "turns": PAIRS,
            "job_s": JOB_SECONDS,
            "sampling_s": SAMPLE_SECONDS,
            "samples_per_s": round(got["sampled"], 2),
        },
        "figures": {
            "job_overhead_pct": round(got["around"] / JOB_SECONDS * 100 + pace, 2),
            "around_a_job_ms": round(got["around"] * 1000),
            "pace_pct": round(pace, 2),
            "shortest_job_ms": round(got["short"] * 1000),
            "sampling_core_pct": round(got["core"], 2),
            "memory_pss_mb": round(got["memory"], 1),
        },
        "aims": {"job_overhead_pct": ["<", 5], "sampling_core_pct": ["<", 1]},
    }
