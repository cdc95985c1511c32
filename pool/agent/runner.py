"""The agent itself: one event loop with the connection, the sampler and the jobs' keeper side by side.

Each of them goes on when another fails: jobs run and samples spool while the installation is away, and a
broken NVML stops neither. Nothing is decided here: what is reported waits in the outbox until the
installation has it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import random
import signal
import time
from typing import Any

from pool.agent import PROTOCOL, VERSION, accounts, capabilities, config, devices, facts, files, layouts, ws
from pool.agent.care import Care
from pool.agent.collector import DOWN_REASON, Collector
from pool.agent.jobs import Jobs
from pool.agent.kmsg import KernelLog
from pool.agent.nvml import utc_now
from pool.agent.outbox import Outbox
from pool.agent.remote import Sessions
from pool.agent.telemetry import Telemetry, event

log = logging.getLogger("gpupool.agent")

HEARTBEAT_SECONDS = 5.0
SAMPLE_SECONDS = 10.0
JOB_POLL_SECONDS = 0.25
INVENTORY_SECONDS = 60.0
SILENCE_SECONDS = 45.0
BACKOFF = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
REFUSED_BACKOFF = float(os.environ.get("GPUPOOL_AGENT_REFUSED_SECONDS", "60"))


class AlreadyRunning(Exception):
    """Another agent holds this state folder."""


class Agent:
    """Everything one node runs. ``run`` returns when ``stop`` was called."""

    def __init__(self, state_dir: str, settings: config.Config) -> None:
        config.prepare(state_dir)
        self._lock = os.open(os.path.join(state_dir, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise AlreadyRunning(state_dir) from error
        self.state_dir = state_dir
        self.settings = settings
        self.outbox = Outbox(os.path.join(state_dir, "outbox"), settings.spool_mib * 1024 * 1024)
        work_root = config.work_root(state_dir, settings)
        self.jobs = Jobs(state_dir, work_root, self.outbox, settings.job_account)
        self.jobs.log_limit = settings.log_limit_mib * 1024 * 1024
        self.jobs.adopt()
        self.sessions = Sessions(self.jobs, settings)
        self.telemetry = Telemetry(self.jobs)
        self.jobs.device_files = lambda uuids: devices.paths(self.telemetry.gpus, uuids)
        self.jobs.indexes = lambda: {str(gpu["uuid"]): int(gpu["index"]) for gpu in self.telemetry.gpus}
        self.collector = Collector()
        self.kernel_log = KernelLog(os.environ.get("GPUPOOL_KMSG", "/dev/kmsg"))
        self.load = facts.HostLoad()
        self.nvml: dict[str, Any] = {"ok": False, "reason": "starting"}
        self.software: dict[str, Any] = {"driver": None, "cuda": None}
        self.heartbeat_s = HEARTBEAT_SECONDS
        self.sample_s = SAMPLE_SECONDS
        self.socket: ws.WebSocket | None = None
        self.welcomed = False
        self.refusal: dict[str, Any] | None = None
        self.care = Care(self.jobs, self.outbox)
        self._layouts: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._done = asyncio.Event()
        self._job_news = asyncio.Event()
        self.jobs.watch = self._watch
        self._broken_told = 0
        self.outbox.on_message.append(self._wake.set)

    # -- messages --------------------------------------------------------------------------------------------

    def hello(self) -> dict[str, Any]:
        details = facts.machine()
        details.update(self.software, nvml=self.nvml, kernel_log=self.kernel_log.readable)
        details["can"] = capabilities.found()
        details["address"] = self.socket.local_address if self.socket is not None else ""
        return {
            "t": "hello",
            "v": PROTOCOL,
            "agent_version": VERSION,
            "boot_id": facts.boot_id(),
            "hostname": facts.hostname(),
            "machine_id": facts.machine_id(self.state_dir),
            "now": utc_now(),
            "run_as": {
                "root": os.geteuid() == 0,
                "user": accounts.own_name(),
                "otherwise": self.jobs.job_account or "",
            },
            "facts": details,
            "gpus": self.telemetry.gpus,
            "jobs": self.jobs.describe(),
            "spool": {"waiting": self.outbox.vital.waiting, "samples_dropped": self.outbox.samples.dropped},
        }

    async def send(self, message: dict[str, Any]) -> None:
        if self.socket is not None:
            await self.socket.send(json.dumps(message, ensure_ascii=False, separators=(",", ":")))

    async def handle(self, message: dict[str, Any]) -> None:
        """One message of the installation. An order is acknowledged once its folder is on disk."""
        kind = message.get("t")
        if kind == "ack":
            self.outbox.acknowledge(int(message["seq"]))
            self._wake.set()
        elif kind == "welcome":
            self.welcomed = True
            self.refusal = None
            self.heartbeat_s = float(message.get("heartbeat_s") or HEARTBEAT_SECONDS)
            self.sample_s = max(0.2, float(message.get("sample_s") or SAMPLE_SECONDS))
            self.jobs.account_map = dict(message.get("accounts") or {})
            self._wake.set()
        elif kind == "start":
            await self._start(str(message["allocation"]), int(message["member"]), message.get("spec") or {})
        elif kind == "stop":
            grace = message.get("grace_s")
            self.jobs.stop(
                str(message["allocation"]),
                int(message.get("member") or 0),
                str(message.get("signal") or "SIGTERM"),
                10.0 if grace is None else float(grace),
            )
        elif kind == "checkpoint":
            names = ("case", "kind", "signal", "run", "seconds")
            order = {name: message.get(name) for name in names}
            self.jobs.checkpoint(str(message["allocation"]), int(message.get("member") or 0), order)
            self._job_news.set()
        elif kind == "check_free":
            member = int(message.get("member") or 0)
            await self._check_free(str(message["allocation"]), member, list(message.get("gpu_uuids") or []))
        elif kind == "layout":
            self._layouts.append(asyncio.ensure_future(self._layout(message)))
        elif kind == "remote":
            self.sessions.begin(message)
        elif kind == "refused":
            self.refusal = {"code": message.get("code"), "detail": message.get("detail")}
        if kind in ("start", "checkpoint", "stop", "check_free", "layout") and message.get("command"):
            await self.send({"t": "command_ack", "command": message["command"]})

    async def _start(self, allocation: str, member: int, spec: dict[str, Any]) -> None:
        """Look once more at the cards, then start; a card that is not free is told and nothing is started."""
        devices = list(spec.get("mig_uuids") or spec.get("gpu_uuids") or [])
        if devices and (allocation, member) not in self.jobs.jobs:
            answer = await self.collector.ask("sample")
            found = self.telemetry.check_free(devices, answer, allocation)
            busy = {uuid: item for uuid, item in found.items() if not item["free"]}
            if busy:
                detail = ", ".join(f"{uuid}: {item['reason']}" for uuid, item in busy.items())
                error = {"code": "gpu_not_free", "detail": detail, "retryable": True, "gpus": busy}
                self.jobs.refuse(allocation, member, error)
                return
        self.jobs.start(allocation, member, spec)

    async def _layout(self, message: dict[str, Any]) -> None:
        """Split a card anew; the inventory afterwards shows the slices."""
        self.outbox.put(await layouts.carry_out(message, self.jobs))
        await self._take_inventory()

    async def _check_free(self, allocation: str, member: int, uuids: list[str]) -> None:
        answer = await self.collector.ask("sample") if uuids else {"ok": True, "rows": []}
        found = self.telemetry.check_free(uuids, answer, allocation)
        job = self.jobs.jobs.get((allocation, member))
        if job is not None:
            self.jobs.end_left(job, found)
        self.outbox.put({"t": "free", "allocation": allocation, "member": member, "gpus": found})

    # -- connection ------------------------------------------------------------------------------------------

    async def _connection(self) -> None:
        failures = 0
        while not self._done.is_set():
            self.welcomed = False
            try:
                await self._one_connection()
            except ws.HandshakeRefused as error:
                if error.status in (401, 403):
                    self.refusal = {"code": f"http_{error.status}", "detail": error.reason}
                log.warning("the installation refused the connection: %s", error)
            except ws.Closed as error:
                if error.code in (4401, 4403) and self.refusal is None:
                    self.refusal = {"code": f"close_{error.code}", "detail": error.reason}
                log.info("connection closed: %s", error)
            except (ws.WebSocketError, OSError, ValueError, asyncio.TimeoutError) as error:
                log.info("no connection: %s", error)
            finally:
                if self.socket is not None:
                    self.socket.abort()
                    self.socket = None
            failures = 0 if self.welcomed else failures + 1
            pause = REFUSED_BACKOFF if self.refusal else BACKOFF[min(failures, len(BACKOFF) - 1)]
            pause *= random.uniform(0.5, 1.0)
            self._write_status()
            await self._sleep(pause)

    async def _one_connection(self) -> None:
        if self.refusal:
            # Perhaps this node was enrolled again meanwhile: its new token lies in the settings.
            fresh = config.load(self.state_dir)
            if fresh.token and fresh.token != self.settings.token:
                self.settings.token, self.settings.node_uid = fresh.token, fresh.node_uid
                self.refusal = None
        headers = {"Authorization": f"Bearer {self.settings.token}", "User-Agent": f"gpupool-agent/{VERSION}"}
        self.socket = socket = await ws.connect(self.settings.ws_url, headers, self.settings.ca_file)
        self.outbox.rewind()
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._reader(socket))]
        try:
            await self.send(self.hello())
            deadline = time.monotonic() + 30
            while not self.welcomed and time.monotonic() < deadline and not tasks[0].done():
                await asyncio.sleep(0.02)
            if self.welcomed:
                log.info("connected as node %s", self.settings.node_uid)
                self._write_status()
                tasks.append(asyncio.ensure_future(self._sender(socket)))
                tasks.append(asyncio.ensure_future(self._heart(socket)))
            elif not tasks[0].done():
                raise ws.WebSocketError("no welcome")
            tasks.append(asyncio.ensure_future(self._done.wait()))
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._done.is_set():
                await socket.close(1001, "agent stops")
            for task in finished:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _reader(self, socket: ws.WebSocket) -> None:
        while True:
            message = json.loads(await socket.receive())
            if isinstance(message, dict):
                try:
                    await self.handle(message)
                except (KeyError, TypeError, ValueError) as error:
                    log.warning("an order that cannot be read: %s (%r)", message.get("t"), error)

    async def _sender(self, socket: ws.WebSocket) -> None:
        while True:
            self._wake.clear()
            text = self.outbox.next()
            if text is None:
                await self._wake.wait()
            else:
                await socket.send(text)

    async def _heart(self, socket: ws.WebSocket) -> None:
        while True:
            await self.send({"t": "heartbeat", "now": utc_now()})
            await socket.ping()
            if asyncio.get_event_loop().time() - socket.last_received > SILENCE_SECONDS:
                raise ws.WebSocketError("the installation is silent")
            if self.outbox.overdue():
                self.outbox.rewind()
                self._wake.set()
            self._write_status()
            await asyncio.sleep(self.heartbeat_s)

    # -- the other loops -------------------------------------------------------------------------------------

    async def _sampler(self) -> None:
        next_inventory = 0.0
        while not self._done.is_set():
            began = time.monotonic()
            if began >= next_inventory:
                await self._take_inventory()
                next_inventory = began + INVENTORY_SECONDS
            try:
                if not await self._sample_once():
                    next_inventory = min(next_inventory, began + 5.0)
            except OSError as error:  # a full disk: this sample is lost, the next may not be
                log.error("samples: %s", error)
            while not self._done.is_set():
                left = began + self.sample_s - time.monotonic()  # the welcome may shorten it meanwhile
                if left <= 0:
                    break
                await self._sleep(min(left, 1.0))

    async def _sample_once(self) -> bool:
        """Put one batch and its events into the outbox. False when the cards are to be counted again soon."""
        rows: list[list[Any]] = []
        told: list[dict[str, Any]] | None = None
        steady = True
        if self.nvml["ok"]:
            answer = await self.collector.ask("sample")
            if answer.get("ok"):
                rows = answer["rows"]
                told = None if self.kernel_log.readable else answer.get("xids")
            else:
                self._nvml_is(False, str(answer.get("reason")))
                steady = False
        events = self.telemetry.digest(rows) if rows else []
        events += self.care.shares(rows)
        self.outbox.put({"t": "samples", "rows": rows, "host": self.load.read()})
        for item in [*events, *self.telemetry.xid_events(self.kernel_log.read(), told)]:
            self.outbox.put(item)
        return steady and not any(item["kind"] in ("gpu_lost", "gpu_back") for item in events)

    async def _take_inventory(self) -> None:
        answer = await self.collector.ask("inventory")
        if answer.get("ok"):
            changed = self.telemetry.inventory(answer)
            self.software = {"driver": answer.get("driver"), "cuda": answer.get("cuda")}
            changed = self._nvml_is(True, None) or changed
        else:
            changed = self._nvml_is(False, str(answer.get("reason")))
        if changed and self.welcomed:
            await self._say_hello_again()

    async def _say_hello_again(self) -> None:
        try:
            await self.send(self.hello())
        except ws.Closed:
            return  # the connection's own task deals with it; the next connection says hello anyway

    def _nvml_is(self, ok: bool, reason: str | None) -> bool:
        """Remember NVML's state; True when it changed. A collector that breaks is one event."""
        if reason == DOWN_REASON and self.collector.breaks > self._broken_told:
            self._broken_told = self.collector.breaks
            self.outbox.put(event("nvml_broken", utc_now(), None, {"reason": reason}))
        changed = self.nvml != {"ok": ok, "reason": reason}
        self.nvml = {"ok": ok, "reason": reason}
        return changed

    def _watch(self, news: int) -> None:
        """Poll at once when this shim has news, not only at the next turn."""
        loop = asyncio.get_event_loop()

        def ready() -> None:
            try:
                ended = not os.read(news, 16)
            except OSError:
                ended = True
            if ended:
                loop.remove_reader(news)
                os.close(news)
            self._job_news.set()

        loop.add_reader(news, ready)

    async def _keeper(self) -> None:
        cleaned = 0.0
        while not self._done.is_set():
            try:
                self.jobs.poll()
                self.care.health.turn(self.jobs.active())
                if time.monotonic() - cleaned > 3600:
                    self.jobs.forget_old()
                    cleaned = time.monotonic()
            except OSError as error:  # a full disk must not end the agent: the files keep the truth
                log.error("jobs: %s", error)
            try:
                await asyncio.wait_for(self._job_news.wait(), JOB_POLL_SECONDS)
            except asyncio.TimeoutError:
                pass
            self._job_news.clear()

    async def _sleep(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._done.wait(), seconds)
        except asyncio.TimeoutError:
            return

    def _write_status(self) -> None:
        """What ``status`` prints; no secrets in it."""
        value = {
            "at": utc_now(),
            "pid": os.getpid(),
            "version": VERSION,
            "node_uid": self.settings.node_uid,
            "url": self.settings.url,
            "connected": self.welcomed and self.socket is not None,
            "refusal": self.refusal,
            "nvml": self.nvml,
            "gpus": len(self.telemetry.gpus),
            "jobs": [f"{job.allocation}.{job.member} {job.state}" for job in self.jobs.active()],
            "waiting_messages": self.outbox.vital.waiting + self.outbox.samples.waiting,
            "samples_dropped": self.outbox.samples.dropped,
        }
        try:
            files.write_json(os.path.join(self.state_dir, "status.json"), value, 0o644)
        except OSError as error:
            log.error("status: %s", error)

    def stop(self) -> None:
        """End the agent; jobs go on and are adopted by the next one."""
        self._done.set()
        self._wake.set()
        self._job_news.set()

    async def run(self) -> None:
        loop = asyncio.get_event_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self._take_inventory()
        parts = (self._connection(), self._sampler(), self._keeper(), self.care.folders(self._done))
        tasks = [asyncio.ensure_future(part) for part in parts]
        waiter: asyncio.Future[Any] = asyncio.ensure_future(self._done.wait())
        await asyncio.wait([*tasks, waiter], return_when=asyncio.FIRST_COMPLETED)
        finished = [task for task in tasks if task.done()]  # none, unless one of them broke
        self.stop()
        await asyncio.wait(tasks, timeout=5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, waiter, return_exceptions=True)
        await self.sessions.close()
        await self.collector.close()
        self.outbox.close()
        self._write_status()
        for task in finished:
            task.result()


async def run_agent(state_dir: str, settings: config.Config) -> None:
    """Make the agent inside the running loop (its events belong to it) and run it until a signal."""
    agent = Agent(state_dir, settings)
    await agent.run()
