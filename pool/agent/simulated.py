"""Simulated agents for the demo: many nodes in one light process, over the real protocol and real sockets.

They report cards that do not exist and "run" jobs by showing their life: commands are echoed, never executed.

Fleet file (JSON, made by the demo's seed; mode 0600, as it holds tokens)::

    {"nodes": [{
        "name": "sh-a100-01", "token": "gpn_…",              # the node's own token, from enrolment
        "machine_id": "…", "hostname": "sh-a100-01",          # machine_id must be the enrolled one
        "os": "Ubuntu 22.04.5 LTS", "kernel": "5.15.0-122-generic", "cpu_model": "…",
        "cpu_milli": 128000, "memory_mib": 1031000, "driver": "550.54.15", "cuda": "12.4",
        "gpus": [{
            "uuid": "GPU-…", "index": 0, "name": "NVIDIA A100-SXM4-80GB", "memory_mib": 81920,
            "power_limit_mw": 400000,                          # optional from here on
            "pci_bus_id": "00000000:1B:00.0", "serial": "…", "nvlink": {"links": 12, "peers": ["GPU-…"]},
            "mig": {"capable": true, "enabled": true, "slices": [
                {"uuid": "MIG-…", "profile": "1g.10gb", "gi": 9, "ci": 0, "start": 0, "size": 1,
                 "memory_mib": 9984}]},
            "behaviour": "normal" | "xid" | "no_data" | "lost", "xid": 79
        }],
        "jobs": [{                                             # what runs there when the demo begins
            "allocation": "<uid>", "member": 0, "gpu_uuids": ["GPU-…"], "mig_uuids": [], "charge_milli": 1000,
            "user": "li.ming", "started_at": "2026-01-01T00:00:00Z", "seconds": 7200 | null
        }]
    }]}

What runs is kept beside the fleet file (``….state``), so that a restart of this process forgets no job.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from datetime import datetime
from typing import Any

from pool.agent import files
from pool.agent.simulated_devices import unit
from pool.agent.simulated_node import LOG_STEPS, SimulatedNode


class Fleet:
    """All simulated nodes, and the file that remembers their jobs."""

    def __init__(self, path: str, url: str) -> None:
        self.state_path = path + ".state"
        fleet = files.read_json(path)
        if not fleet:
            raise FileNotFoundError(f"{path} is missing or no fleet file")
        ws_url = "ws" + url.rstrip("/")[4:] + "/agent/ws/"
        self._dirty = False
        self.nodes = [SimulatedNode(node, ws_url, self._note) for node in fleet["nodes"]]
        kept = files.read_json(self.state_path) or {}
        for node in self.nodes:
            for job in kept.get(node.node["name"], []):
                node.take(job)
            for job in node.node.get("jobs") or []:
                self._begin(node, job)

    @staticmethod
    def _begin(node: SimulatedNode, job: dict[str, Any]) -> None:
        """A job of the fleet file that the state file does not know yet."""
        if f"{job['allocation']}.{job.get('member') or 0}" in node.jobs:
            return
        started = job.get("started_at")
        since = datetime.fromisoformat(started.replace("Z", "+00:00")).timestamp() if started else time.time()
        made = {"member": 0, "mig_uuids": [], "charge_milli": 1000, "seconds": None, "user": None}
        made.update(job)
        made.update(state="running", since=since, run_at=since, offset=0, step=LOG_STEPS, stop_at=None)
        made.update(pid=20_000 + int(unit("pid", job["allocation"]) * 40_000), command="(before)")
        node.take(made)

    def _note(self) -> None:
        self._dirty = True

    async def _keep(self) -> None:
        while True:
            for node in self.nodes:
                node.advance()
            if self._dirty:
                self._dirty = False
                old = time.time() - 86400
                kept = {
                    node.node["name"]: [
                        job for job in node.jobs.values() if job["state"] != "exited" or job["since"] > old
                    ]
                    for node in self.nodes
                }
                files.write_json(self.state_path, kept)
            await asyncio.sleep(0.25)

    async def run(self) -> None:
        """Run all nodes until cancelled."""
        running = [asyncio.ensure_future(node.run()) for node in self.nodes]
        await asyncio.sleep(0)
        await asyncio.gather(self._keep(), *running)


async def _play(path: str, url: str) -> None:
    await Fleet(path, url).run()  # made inside the loop: its events belong to it


def main(argv: list[str] | None = None) -> int:
    """`python -m pool.agent.simulated FLEET.json --url http://…`"""
    parser = argparse.ArgumentParser(description="simulated agents for the demo")
    parser.add_argument("fleet")
    parser.add_argument("--url", required=True)
    options = parser.parse_args(argv)
    os.umask(0o077)
    try:
        asyncio.run(_play(options.fleet, options.url))
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
