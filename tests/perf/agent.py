"""What the agent costs: a job started by it against the same command by hand, and sampling eight GPUs each second.

The real zipapp runs against a small server that speaks the protocol, with the fake NVML under it (which reads its
state file at every call, so that a real library is cheaper). Times of a job are those of the person who waits: from
the order leaving the server to its end arriving there.
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
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

from pool.agent import build, config, procs

NATIVE = Path(__file__).resolve().parents[1] / "native" / "fake_nvml.c"
WORK = "import sys; n = 0\nfor i in range(int(sys.argv[1])): n += i * i % 7\nprint(n)"
GPUS, PAIRS, SAMPLE_SECONDS, TARGET_SECONDS = 8, 5, 30.0, 5.0


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
            return {"core": core, "sampled": sampled, "memory": memory} | await _jobs(server, python, account)
        finally:
            agent.terminate()
            agent.wait(15)


async def _jobs(server: Server, python: str, account: str | None) -> dict[str, Any]:
    rounds = 2_000_000
    once = _by_hand([python, "-c", WORK, str(rounds)], account)
    argv = [python, "-c", WORK, str(int(rounds * TARGET_SECONDS / once))]
    hand: list[float] = []
    ours: list[float] = []
    for number in range(PAIRS):
        if number % 2 == 0:
            hand.append(await asyncio.to_thread(_by_hand, argv, account))
        seconds, answer = await server.run(f"job-{number}", argv)
        if answer["exit_code"] != 0:
            raise RuntimeError(f"the job failed: {answer}")
        ours.append(seconds)
        if number % 2:
            hand.append(await asyncio.to_thread(_by_hand, argv, account))
    short = [(await server.run(f"short-{number}", ["/bin/true"]))[0] for number in range(PAIRS)]
    return {
        "hand": statistics.median(hand),
        "more": statistics.median(mine - other for mine, other in zip(ours, hand, strict=True)),
        "ours": statistics.median(ours),
        "short": statistics.median(short),
    }


def run() -> dict[str, Any]:
    """Overheads in percent, with the times they come from."""
    folder = Path(tempfile.mkdtemp(prefix="gpupool-perf-agent-"))
    folder.chmod(0o755)
    try:
        got = asyncio.run(_measure(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "sizes": {
            "gpus": GPUS,
            "pairs": PAIRS,
            "sampling_s": SAMPLE_SECONDS,
            "samples_per_s": round(got["sampled"], 2),
        },
        "figures": {
            "job_overhead_pct": round(got["more"] / got["hand"] * 100, 2),
            "job_by_hand_s": round(got["hand"], 3),
            "job_by_agent_s": round(got["ours"], 3),
            "shortest_job_ms": round(got["short"] * 1000),
            "sampling_core_pct": round(got["core"], 2),
            "memory_pss_mb": round(got["memory"], 1),
        },
        "aims": {"job_overhead_pct": ["<", 5], "sampling_core_pct": ["<", 1]},
    }
