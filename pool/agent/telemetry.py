"""From NVML's answers to messages: samples, lost and returned cards, foreign processes, seen-free checks."""

from __future__ import annotations

from typing import Any

from pool.agent import kmsg, procs
from pool.agent.jobs import Jobs
from pool.agent.nvml import utc_now

FREE_MEMORY_MIB = 512


class Telemetry:
    """Keeps what was seen last, so that a change is one event and not one per sample."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.gpus: list[dict[str, Any]] = []
        self._lost: set[str] = set()
        self._foreign: dict[tuple[str, int], int | None] = {}

    def inventory(self, answer: dict[str, Any]) -> bool:
        """Take a new inventory; True when cards, slices or their order changed (a new ``hello`` is due)."""
        gpus = answer.get("gpus") or []
        changed = gpus != self.gpus
        self.gpus = gpus
        return changed

    def uuid_at(self, bus: str) -> str | None:
        wanted = kmsg.bus_key(bus)
        for gpu in self.gpus:
            if wanted is not None and kmsg.bus_key(gpu.get("pci_bus_id")) == wanted:
                return str(gpu["uuid"])
        return None

    def digest(self, rows: list[list[Any]]) -> list[dict[str, Any]]:
        """Mark each process with its job and return the events that these rows give rise to."""
        events: list[dict[str, Any]] = []
        present: set[tuple[str, int]] = set()
        for gpu_uuid, mig_uuid, at, values, missing, processes in rows:
            for process in processes:
                owner = self.jobs.owner_of(process["pid"])
                if owner is not None:
                    process["allocation"] = owner.allocation
                    continue
                key = (gpu_uuid, process["pid"])
                present.add(key)
                ticks = procs.start_ticks(process["pid"])
                if self._foreign.get(key, -1) != ticks:
                    self._foreign[key] = ticks
                    leased = any(gpu_uuid in job.gpu_uuids for job in self.jobs.active())
                    data = {
                        "pid": process["pid"],
                        "name": process["name"],
                        "user": process["user"],
                        "mem_mib": process["mem_mib"],
                        "leased": leased,
                        "mig_uuid": mig_uuid,
                    }
                    events.append(event("foreign_process", at, gpu_uuid, data))
            if mig_uuid is None:
                lost = not values and "gpu_lost" in missing.values()
                if lost and gpu_uuid not in self._lost:
                    self._lost.add(gpu_uuid)
                    events.append(event("gpu_lost", at, gpu_uuid, {"reason": "gpu_lost"}))
                elif not lost and gpu_uuid in self._lost:
                    self._lost.discard(gpu_uuid)
                    events.append(event("gpu_back", at, gpu_uuid, {}))
        for key in [key for key in self._foreign if key not in present]:
            del self._foreign[key]
            events.append(event("foreign_gone", utc_now(), key[0], {"pid": key[1]}))
        return events

    def xid_events(
        self, reports: list[dict[str, Any]], told: list[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Events of the kernel log's reports. What NVML ``told`` counts only where that log cannot be read
        (``told`` is None otherwise): the log has every code with its process, NVML has not (pitfall P16)."""
        found = [
            event(
                "xid",
                utc_now(),
                self.uuid_at(report["bus"]),
                {key: report[key] for key in ("xid", "pid", "bus", "text")},
            )
            for report in reports
        ]
        for one in told or []:
            found.append(event("xid", utc_now(), one["gpu_uuid"], {"xid": one["xid"], "via": "nvml"}))
        return found

    def check_free(
        self, wanted: list[str], answer: dict[str, Any], ended: str | None = None
    ) -> dict[str, dict[str, Any]]:
        """{uuid: {free, reason, procs}} for cards (or MIG slices) that ``ended`` held until now.

        A card that other jobs of this node share is free of *this* allocation when no process is left that is
        not theirs; its memory is theirs to use then and is not judged.
        """
        rows = {row[1] or row[0]: row for row in answer.get("rows") or []} if answer.get("ok") else {}
        result: dict[str, dict[str, Any]] = {}
        for uuid in wanted:
            row = rows.get(uuid)
            if row is None:
                why = "gpu_lost" if answer.get("ok") else str(answer.get("reason") or "gpu_lost")
                result[uuid] = {"free": False, "reason": why, "procs": []}
                continue
            _, _, _, values, missing, processes = row
            others = [job for job in self.jobs.active() if job.allocation != ended]
            shared = any(uuid in job.gpu_uuids for job in others)
            left = []
            for process in processes:
                owner = self.jobs.owner_of(process["pid"])
                if owner is None or owner.allocation == ended:
                    left.append(process)
            reason: str | None = None
            if not values and missing:
                reason = next(iter(missing.values()))
            elif left:
                reason = "processes"
            elif not shared and values.get("mem_used", 0) > FREE_MEMORY_MIB:
                reason = "memory_in_use"
            result[uuid] = {"free": reason is None, "reason": reason, "procs": left}
        return result


def event(kind: str, at: str, gpu_uuid: str | None, data: dict[str, Any]) -> dict[str, Any]:
    return {"t": "event", "kind": kind, "at": at, "gpu_uuid": gpu_uuid, "data": data}
