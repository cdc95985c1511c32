"""One simulated node: its cards, its jobs, its connection. Commands are echoed, never executed."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

from pool.agent import PROTOCOL, VERSION, ws
from pool.agent.nvml import utc_now
from pool.agent.simulated_devices import Card, curve_of, unit

DEFAULT_SECONDS = 900.0
STEP_SECONDS = 5.0
LOG_STEPS = 400
XID_AFTER = 45.0
WINDOW = 32


def _seconds(spec: dict[str, Any]) -> float | None:
    """How long a simulated command takes: what it says (`SIMULATE_SECONDS`, `sleep n`), else a quarter hour."""
    if spec.get("hold"):
        return None
    wish = (spec.get("env") or {}).get("SIMULATE_SECONDS")
    found = re.search(r"\bsleep\s+(\d+)", str(spec.get("command") or " ".join(spec.get("argv") or [])))
    try:
        return float(wish or (found.group(1) if found else DEFAULT_SECONDS))
    except ValueError:
        return DEFAULT_SECONDS


class SimulatedNode:
    """One node: its cards, its jobs, its connection. ``changed`` is called when its jobs did."""

    def __init__(self, node: dict[str, Any], ws_url: str, changed: Callable[[], None]) -> None:
        self.node = node
        self.ws_url = ws_url
        self.changed = changed
        self.cards = {}
        for item in node.get("gpus") or []:
            report = {key: value for key, value in item.items() if key not in ("behaviour", "xid")}
            report.setdefault("minor", report["index"])
            report.setdefault("serial", None)
            report.setdefault("pci_bus_id", f"00000000:{0x1B + 0x10 * int(report['index']):02X}:00.0")
            report.setdefault("mig", {"capable": False, "enabled": False, "slices": []})
            report.setdefault("numa", int(2 * int(report["index"]) >= len(node["gpus"])))  # two sockets
            report.setdefault("nvlink", None)
            report.setdefault("pcie", {"gen": 4, "width": 16})
            card = Card(report, str(item.get("behaviour") or "normal"), int(item.get("xid") or 0))
            self.cards[card.uuid] = card
        self.jobs: dict[str, dict[str, Any]] = {}
        self.seq = int(time.time() * 1000)
        self.unacked: dict[int, str] = {}
        self.socket: ws.WebSocket | None = None
        self._unsent: list[int] = []
        self._samples: set[int] = set()  # those of the unacknowledged that are samples
        self._ahead: set[int] = set()  # other messages sent on this connection and not acknowledged yet
        self._wake = asyncio.Event()
        self.sample_s = 5.0
        self.heartbeat_s = 5.0
        self.began = time.time()
        self.xid_told = False

    # -- jobs ------------------------------------------------------------------------------------------------

    def take(self, job: dict[str, Any]) -> None:
        """Have a job on the cards (a new one, or one from the fleet or state file)."""
        key = f"{job['allocation']}.{job['member']}"
        self.jobs[key] = job
        if job["state"] in ("starting", "running"):
            self._occupy(job)

    def _occupy(self, job: dict[str, Any]) -> None:
        share = min(1.0, (job.get("charge_milli") or 1000) / 1000 / max(1, len(job["gpu_uuids"])))
        for number, uuid in enumerate(job["gpu_uuids"]):
            card = self.cards.get(uuid)
            if card is None:
                continue
            part = next((s["uuid"] for s in card.slices if s["uuid"] in (job.get("mig_uuids") or [])), None)
            card.jobs.append(
                {
                    "allocation": job["allocation"],
                    "member": job["member"],
                    "seed": f"{job['allocation']}/{number}",
                    "curve": curve_of(job["allocation"]),
                    "since": job["since"],
                    "share": share,
                    "cards": len(job["gpu_uuids"]),
                    "pid": job["pid"],
                    "user": job.get("user"),
                    "mig": part,
                    "memory": 0,
                }
            )

    def _vacate(self, job: dict[str, Any]) -> None:
        for card in self.cards.values():
            card.jobs = [item for item in card.jobs if item["allocation"] != job["allocation"]]

    def start(self, message: dict[str, Any]) -> None:
        """A start order: the second one for the same member changes nothing."""
        key = f"{message['allocation']}.{message['member']}"
        if key in self.jobs:
            return
        spec = message.get("spec") or {}
        job = {
            "allocation": message["allocation"],
            "member": message["member"],
            "state": "starting",
            "pid": 20_000 + int(unit("pid", key) * 40_000),
            "since": time.time(),
            "run_at": time.time() + 0.6 + 1.2 * unit("start", key),
            "seconds": _seconds(spec),
            "gpu_uuids": list(spec.get("gpu_uuids") or []),
            "mig_uuids": list(spec.get("mig_uuids") or []),
            "charge_milli": spec.get("charge_milli"),
            "user": spec.get("system_account") or spec.get("user"),
            "offset": 0,
            "step": 0,
            "stop_at": None,
            "command": str(spec.get("command") or " ".join(spec.get("argv") or []) or "(hold)"),
        }
        self.take(job)
        self.tell_job(job)
        self.changed()

    def stop(self, message: dict[str, Any]) -> None:
        """A stop order: the job ends after a short while, well within its grace."""
        job = self.jobs.get(f"{message['allocation']}.{message.get('member') or 0}")
        if job is None:
            ended = {"allocation": message["allocation"], "member": message.get("member") or 0}
            ended.update(
                state="exited", pid=None, started_at=None, ended_at=utc_now(), exit_code=None, signal=None
            )
            ended["error"] = None
            self.put(dict(ended, t="job"))
        elif job["state"] == "exited":
            self.tell_job(job)
        elif job["stop_at"] is None:
            pause = min(float(message.get("grace_s") or 0), 1.0 + 2.0 * unit("stop", job["allocation"]))
            job["stop_at"] = time.time() + pause
            self.say(job, "[simulated] received SIGTERM, writing a checkpoint")

    def checkpoint(self, message: dict[str, Any]) -> None:
        """A checkpoint order: made up, and told as done."""
        key = f"{message['allocation']}.{message.get('member') or 0}"
        job = self.jobs.get(key)
        runs = job is not None and job["state"] == "running"
        if job is not None and runs:
            self.say(job, "[simulated] checkpoint written")
        answer = {
            "t": "checkpoint",
            "allocation": message["allocation"],
            "member": message.get("member") or 0,
        }
        detail = "simulated" if runs else "the job does not run"
        self.put(dict(answer, case=message.get("case"), ok=runs, detail=detail, exit_code=None))

    def advance(self) -> None:
        """Bring every job to where it should be by now."""
        clock = time.time()
        for job in self.jobs.values():
            if job["state"] == "starting" and clock >= job["run_at"]:
                job.update(state="running", since=clock, started_at=utc_now())
                self._vacate(job)
                self._occupy(job)
                self.tell_job(job)
                self.changed()
                devices = ",".join(job["mig_uuids"] or job["gpu_uuids"])
                self.say(job, f"[simulated] {self.node['name']}: nothing is executed, this output is made up")
                self.say(job, f"CUDA_DEVICE_ORDER=PCI_BUS_ID\nCUDA_VISIBLE_DEVICES={devices}")
                self.say(job, "$ " + job["command"])
            if job["state"] != "running":
                continue
            ended = job["seconds"] is not None and clock - job["since"] >= job["seconds"]
            if (job["stop_at"] is not None and clock >= job["stop_at"]) or ended:
                stopped = job["stop_at"] is not None
                self.say(job, "[simulated] stopped" if stopped else "[simulated] done")
                code = None if stopped else 0
                job.update(state="exited", ended_at=utc_now(), exit_code=code, signal=15 if stopped else None)
                self._vacate(job)
                self.tell_job(job)
                self.changed()
            elif clock - job["since"] >= (job["step"] + 1) * STEP_SECONDS and job["step"] < LOG_STEPS:
                # One line however long nobody looked (this process was stopped meanwhile, say).
                job["step"] = min(LOG_STEPS, int((clock - job["since"]) / STEP_SECONDS))
                loss = 2.4 / (1 + 0.05 * job["step"]) + 0.05 * unit("loss", job["allocation"], job["step"])
                self.say(job, f"step {job['step'] * 10:5d}  loss {loss:.4f}")

    def describe(self, job: dict[str, Any]) -> dict[str, Any]:
        names = ("allocation", "member", "state", "pid", "started_at", "ended_at", "exit_code", "signal")
        return {name: job.get(name) for name in names} | {"error": None, "account": job.get("user")}

    def tell_job(self, job: dict[str, Any]) -> None:
        self.put(dict(self.describe(job), t="job"))

    def say(self, job: dict[str, Any], text: str) -> None:
        """Lines of the job's output."""
        data = text + "\n"
        size = len(data.encode("utf-8", "replace"))
        message = {"t": "log", "allocation": job["allocation"], "member": job["member"]}
        self.put(dict(message, offset=job["offset"], size=size, data=data))
        job["offset"] += size

    # -- connection ------------------------------------------------------------------------------------------

    def put(self, message: dict[str, Any]) -> None:
        """Queue a durable message; samples are not worth keeping while there is no connection."""
        if message["t"] == "samples" and (self.socket is None or len(self._samples) >= WINDOW):
            return
        self.seq += 1
        if message["t"] == "samples":
            self._samples.add(self.seq)
        self.unacked[self.seq] = json.dumps(dict(message, seq=self.seq), ensure_ascii=False)
        self._unsent.append(self.seq)
        self._wake.set()

    def hello(self) -> dict[str, Any]:
        node = self.node
        facts = {name: node.get(name) for name in ("os", "kernel", "cpu_model", "cpu_milli", "memory_mib")}
        facts.update(driver=node.get("driver"), cuda=node.get("cuda"), simulated=True)
        facts["nvml"] = {"ok": True, "reason": None}
        seen = [card.report for card in self.cards.values()]
        return {
            "t": "hello",
            "v": PROTOCOL,
            "agent_version": VERSION,
            "boot_id": f"simulated-{node['name']}",
            "hostname": node.get("hostname") or node["name"],
            "machine_id": node["machine_id"],
            "now": utc_now(),
            "run_as": {"root": True, "user": "root"},
            "facts": facts,
            "gpus": seen,
            "jobs": [self.describe(job) for job in self.jobs.values()],
        }

    async def run(self) -> None:
        """Connect, live, connect again; for ever."""
        failures = 0
        while True:
            try:
                headers = {"Authorization": "Bearer " + self.node["token"]}
                self.socket = await ws.connect(self.ws_url, headers)
                failures = 0
                await self._live(self.socket)
            except (ws.WebSocketError, OSError, ValueError, asyncio.TimeoutError):
                failures += 1
            finally:
                if self.socket is not None:
                    self.socket.abort()
                    self.socket = None
            for seq in self._samples:
                self.unacked.pop(seq, None)
            self._samples.clear()
            await asyncio.sleep(min(30.0, 1.5**failures) * random.uniform(0.5, 1.0))

    async def _live(self, socket: ws.WebSocket) -> None:
        await socket.send(json.dumps(self.hello()))
        self._unsent = sorted(self.unacked)
        self._ahead.clear()
        self._wake.set()
        tasks = [
            asyncio.ensure_future(part(socket))
            for part in (self._read, self._send, self._heart, self._sample)
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, socket: ws.WebSocket) -> None:
        while True:
            message = json.loads(await socket.receive())
            kind = message.get("t")
            if kind == "ack":
                self.unacked.pop(int(message["seq"]), None)
                self._samples.discard(int(message["seq"]))
                self._ahead.discard(int(message["seq"]))
                self._wake.set()
            elif kind == "welcome":
                self.sample_s = float(message.get("sample_s") or 5)
                self.heartbeat_s = float(message.get("heartbeat_s") or 5)
            elif kind == "start":
                self.start(message)
            elif kind == "stop":
                self.stop(message)
            elif kind == "checkpoint":
                self.checkpoint(message)
            elif kind == "check_free":
                found: dict[str, Any] = {
                    uuid: {"free": True, "reason": None, "procs": []} for uuid in message["gpu_uuids"]
                }
                self.put(
                    {
                        "t": "free",
                        "allocation": message["allocation"],
                        "member": message.get("member") or 0,
                        "gpus": found,
                    }
                )
            if message.get("command") and kind in ("start", "checkpoint", "stop", "check_free"):
                await socket.send(json.dumps({"t": "command_ack", "command": message["command"]}))

    async def _send(self, socket: ws.WebSocket) -> None:
        while True:
            self._wake.clear()
            while self._unsent and len(self._ahead) < WINDOW:
                seq = self._unsent.pop(0)
                text = self.unacked.get(seq)
                if text is not None:
                    if seq not in self._samples:
                        self._ahead.add(seq)
                    await socket.send(text)
            await self._wake.wait()

    async def _heart(self, socket: ws.WebSocket) -> None:
        while True:
            await socket.send(json.dumps({"t": "heartbeat", "now": utc_now()}))
            await asyncio.sleep(self.heartbeat_s)

    async def _sample(self, socket: ws.WebSocket) -> None:
        await asyncio.sleep(1 + unit("offset", self.node["name"]))
        while True:
            at, clock = utc_now(), time.time()
            rows = [row for card in self.cards.values() for row in card.rows(at, clock)]
            active = sum(job["state"] == "running" for job in self.jobs.values())
            cpu = min(95.0, 2 + 60 * active / max(1, len(self.cards)) + 3 * unit("cpu", clock))
            memory = int(
                int(self.node.get("memory_mib") or 0) * (0.06 + 0.5 * active / max(1, len(self.cards)))
            )
            host = {"cpu": round(cpu, 1), "mem_used_mib": memory, "iowait": 0.4}
            self.put({"t": "samples", "rows": rows, "host": host})
            if not self.xid_told and clock - self.began > XID_AFTER:
                self._tell_xid()
            await asyncio.sleep(self.sample_s)

    def _tell_xid(self) -> None:
        self.xid_told = True
        for card in self.cards.values():
            if card.behaviour == "xid":
                bus = card.report["pci_bus_id"]
                data = {"xid": card.xid or 79, "pid": None, "bus": bus, "text": "simulated"}
                self.put({"t": "event", "kind": "xid", "at": utc_now(), "gpu_uuid": card.uuid, "data": data})
