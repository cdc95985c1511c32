#!/usr/bin/env python3
"""On a machine with an NVIDIA GPU: that the agent's parts hold against the real thing. `python tests/gpu_check.py`.

Discovery, the four measures, a real CUDA process in a job started as a lease is, its name and memory seen through NVML,
the card seen free after it, and an MPS limit observed. CUDA is called through the driver's own library, so nothing but
the driver is needed. Where there is no GPU it says so and ends with 0; pytest does not collect it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SKIPPED = "gpu_check: skipped, {why}"
ALLOCATION = "01a22e77-76a8-79e1-84ec-88011de29caf"
SECONDS = 60.0

# Holds MIB of memory, tells how many multiprocessors and how much memory the context has, and waits.
WORK = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def must(code, what):
    if code:
        print(what, code, flush=True)
        sys.exit(code if code < 120 else 119)
device, context, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
must(cuda.cuInit(0), "init")
must(cuda.cuDeviceGet(ctypes.byref(device), 0), "device")
must(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device), "context")
must(cuda.cuDeviceGetAttribute(ctypes.byref(count), 16, device), "attribute")
total, free, kept = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_ulonglong()
must(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "memory")
print("sms", count.value, "total_mib", total.value >> 20, flush=True)
code = cuda.cuMemAlloc_v2(ctypes.byref(kept), ctypes.c_size_t(int(sys.argv[1]) << 20))
print("alloc", code, flush=True)
time.sleep(float(sys.argv[2]))
"""


def skip(why: str) -> int:
    """Say that nothing was checked."""
    print(SKIPPED.format(why=why))
    return 0


class Check:
    """The steps; each prints a line, a failed one is counted."""

    def __init__(self, folder: Path) -> None:
        from pool.agent.collector import Collector
        from pool.agent.jobs import Jobs
        from pool.agent.outbox import Outbox
        from pool.agent.telemetry import Telemetry

        self.failed = 0
        self.folder = folder
        for name in ("state/jobs", "work"):
            os.makedirs(folder / name)
        account = "nobody" if os.geteuid() == 0 else None
        outbox = Outbox(str(folder / "state/outbox"))
        self.jobs = Jobs(str(folder / "state"), str(folder / "work"), outbox, account)
        self.telemetry = Telemetry(self.jobs)
        self.collector = Collector()
        self.work = folder / "work.py"
        self.work.write_text(WORK)

    def say(self, what: str, good: bool, detail: Any = "") -> None:
        """One line."""
        self.failed += not good
        print(f"{'ok    ' if good else 'FAILED'} {what}  {detail}", flush=True)

    async def run(self) -> int:
        """All steps; how many failed."""
        inventory = await self.collector.ask("inventory")
        cards = inventory.get("gpus") or []
        self.telemetry.inventory(inventory)
        card = cards[0]
        known = all(card.get(name) for name in ("uuid", "name", "memory_mib", "pci_bus_id"))
        self.say("discovery", known, f"{card.get('name')}, driver {inventory.get('driver')}")
        await self.measures(card["uuid"])
        await self.process(card["uuid"])
        await self.limited(card["uuid"], int(card["memory_mib"]))
        await self.collector.close()
        return self.failed

    async def row(self, uuid: str) -> list[Any]:
        answer = await self.collector.ask("sample")
        self.telemetry.digest(answer.get("rows") or [])
        return next((row for row in answer.get("rows") or [] if row[0] == uuid and row[1] is None), [])

    async def measures(self, uuid: str) -> None:
        row = await self.row(uuid)
        values, missing = row[3], row[4]
        for name in ("util", "mem_used", "temp", "power_mw"):
            self.say(
                f"measure {name}", name in values or name in missing, values.get(name, missing.get(name))
            )

    async def job(self, mib: int, seconds: float, **more: Any) -> tuple[Any, str]:
        """A running job that holds memory, and its output so far."""
        python = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin") or sys.executable
        spec = {"argv": [python, str(self.work), str(mib), str(seconds)], "user": "check", **more}
        job = self.jobs.start(ALLOCATION, more.get("member", 0), spec)
        if job is None:
            raise RuntimeError(json.dumps(list(self.jobs.outbox.vital.messages())[-1]))
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            self.jobs.poll()
            text = Path(job.path("output.log")).read_text() if os.path.exists(job.path("output.log")) else ""
            if "alloc" in text or job.exit is not None:
                return job, text
            await asyncio.sleep(0.2)
        return job, text

    async def end(self, job: Any) -> None:
        job.stop("SIGTERM", 5)
        while not job.finished:
            self.jobs.poll()
            await asyncio.sleep(0.1)

    async def process(self, uuid: str) -> None:
        job, text = await self.job(1024, 60, gpu_uuids=[uuid], charge_milli=1000)
        self.say("a CUDA process in a lease", "alloc 0" in text, text.strip().replace("\n", "; "))
        row = await self.row(uuid)
        mine = [one for one in row[5] if one.get("allocation") == ALLOCATION]
        self.say("seen through NVML as the lease's", bool(mine), mine)
        await self.end(job)
        answer = await self.collector.ask("sample")
        found = self.telemetry.check_free([uuid], answer, ALLOCATION)[uuid]
        self.say("the card is seen free after it", found["free"], found["reason"])

    async def limited(self, uuid: str, memory_mib: int) -> None:
        from pool.agent import mps

        if mps.program() is None:
            print(f"--     MPS limit: not checked, no {mps.PROGRAM} here")
            return
        share = memory_mib // 4
        job, text = await self.job(
            share // 2, 30, member=1, gpu_uuids=[uuid], charge_milli=250, gpu_mem_limit_mib=share
        )
        self.say("half of a share fits", "alloc 0" in text, text.strip().replace("\n", "; "))
        await self.end(job)
        job, text = await self.job(
            share * 2, 30, member=2, gpu_uuids=[uuid], charge_milli=250, gpu_mem_limit_mib=share
        )
        self.say(
            "twice a share is refused by the driver", "alloc 2" in text, text.strip().replace("\n", "; ")
        )
        if job.exit is None:
            await self.end(job)
        self.say("the daemon ended with the work", not os.listdir(self.jobs.daemons.root))


def main() -> int:
    """Check, or say why not."""
    try:
        ctypes.CDLL("libcuda.so.1")
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return skip("there is no NVIDIA driver here")
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) or not count.value:
        return skip("the driver shows no GPU")
    folder = Path(tempfile.mkdtemp(prefix="gpupool-gpu-check-"))
    folder.chmod(0o755)
    try:
        failed = asyncio.run(Check(folder).run())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("gpu_check:", "all is well" if not failed else f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
