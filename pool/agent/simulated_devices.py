"""Cards that do not exist: plausible curves for the demo. Deterministic in the card, the job and the time.

Nothing here measures anything; the demo labels its nodes as simulated.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

MEMORY_RESERVED_MIB = 600
# Name's part → (SM clock at work, memory clock, slowdown from °C) as the makers print them; else those of OTHER.
BOARDS = {
    "H800": (1980, 2619, 87),
    "H100": (1980, 2619, 87),
    "H20": (1980, 2619, 87),
    "A100": (1410, 1593, 92),
    "A30": (1440, 1215, 92),
    "L40S": (2520, 9001, 92),
    "L20": (2520, 9001, 92),
}
OTHER = (1410, 1215, 90)
HBM = ("H800", "H100", "H20", "A100", "A30")
BY_FABRIC = ("H800", "H100", "H20", "A100-SXM")
MIB_S = 1024  # KiB/s
CURVES = ("training", "training", "training", "inference", "interactive", "stalled")


def unit(*parts: Any) -> float:
    """A number in [0, 1) that depends on `parts` alone."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def curve_of(seed: str) -> str:
    """Which kind of work a job looks like."""
    return CURVES[int(unit("curve", seed) * len(CURVES))]


def busy_percent(curve: str, seed: str, age: float, clock: float) -> float:
    """GPU busy time in percent of a job of this kind, `age` seconds after its start, at UNIX time `clock`."""
    phase = unit("phase", seed)
    noise = unit("noise", seed, int(clock)) - 0.5
    if age < 8:  # loading
        return 3 + 4 * noise
    if curve == "training":
        period = 150 + 120 * phase
        dip = 1.0 if (age % period) < period - 9 else 0.12  # evaluation and checkpoint
        return max(0.0, (91 + 6 * phase) * dip + 6 * noise)
    if curve == "inference":
        wave = math.sin(2 * math.pi * (clock / 5400 + phase)) + 0.35 * math.sin(2 * math.pi * clock / 47)
        return 44 + 22 * wave + 14 * noise
    if curve == "interactive":
        return 62 + 30 * noise if unit("cell", seed, int(clock // 40)) > 0.72 else 0.0
    return 100.0 if unit("stall", seed, int(clock // 20)) > 0.86 else 2 + 2 * noise  # waits for its data


@dataclass
class Card:
    """One simulated card. `behaviour`: normal, xid, no_data, lost. `jobs` share it."""

    report: dict[str, Any]
    behaviour: str = "normal"
    xid: int = 0
    heat: float = 32.0
    power: float = 0.0
    energy_mj: float = 0.0
    read_at: float = 0.0
    jobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def uuid(self) -> str:
        return str(self.report["uuid"])

    @property
    def slices(self) -> list[dict[str, Any]]:
        mig = self.report.get("mig") or {}
        return list(mig.get("slices") or []) if mig.get("enabled") else []

    def _driver_facts(
        self, values: dict[str, Any], missing: dict[str, str], busy: float, clock: float
    ) -> None:
        """What a driver tells beside the measures of the wall: clocks, throttling, links, errors. `busy` in percent."""
        name = str(self.report.get("name"))
        top_mhz, memory_mhz, slowdown_c = next((b for part, b in BOARDS.items() if part in name), OTHER)
        limit = int(values["power_limit_mw"])
        works = busy > 1
        capped = busy > 90 and self.power > 0.9 * limit
        pcie = self.report.get("pcie") or {}
        gen, width = int(pcie.get("gen") or 4), int(pcie.get("width") or 16)
        if self.read_at:
            self.energy_mj += self.power * max(0.0, clock - self.read_at)
        else:  # as if the driver had been loaded some weeks ago
            self.energy_mj = limit * 0.4 * (14 + 14 * unit("loaded", self.uuid)) * 86_400
        self.read_at = clock
        values.update(
            sm_clock=int(top_mhz * (0.93 if capped else 1.0)) if works else 345,
            mem_clock=memory_mhz,
            throttle=0x4 if capped else 0 if works else 0x1,
            energy_mj=int(self.energy_mj),
            power_averaged=0 if "A100" in name or "A30" in name else 1,
            slowdown_c=slowdown_c,
            persistence=1,
            # An idle card lowers its link by itself
            pcie_gen=gen if works else 1,
            pcie_gen_max=gen,
            pcie_width=width,
            pcie_width_max=width,
            pcie_replays=int(3 * unit("replays", self.uuid)),
            pcie_rx_kib_s=int(busy * (9 + 22 * unit("rx", self.uuid)) * MIB_S),
            pcie_tx_kib_s=int(busy * (2 + 5 * unit("tx", self.uuid)) * MIB_S),
            ecc_corr=int(2.2 * unit("ecc", self.uuid)),
            ecc_uncorr=0,
            ecc_uncorr_total=0,
            ecc_threshold=0,
            remap_corr=int(1.15 * unit("remap", self.uuid)),
            remap_uncorr=0,
            remap_pending=0,
            remap_failure=0,
        )
        missing.update(retired_pages="not_supported", retired_pending="not_supported")
        if any(part in name for part in HBM):
            values["mem_temp"] = round(self.heat + 4 + 8 * busy / 100)
        else:
            missing["mem_temp"] = "not_supported"
        missing["fan"] = "not_supported"  # cards of servers are cooled by the server
        links = int((self.report.get("nvlink") or {}).get("links") or 0)
        together = busy if any(job["cards"] > 1 for job in self.jobs) else 0.0
        for rate in ("nvlink_rx_kib_s", "nvlink_tx_kib_s"):
            if links:
                values[rate] = int(together * links * (40 + 60 * unit(rate, self.uuid)) * MIB_S)
            else:
                missing[rate] = "not_supported"
        if links and any(part in name for part in BY_FABRIC):
            values["fabric_state"] = 3
        else:
            missing["fabric_state"] = "not_supported"

    def rows(self, at: str, clock: float) -> list[list[Any]]:
        """Sample rows of the card and its slices, as an agent sends them."""
        if self.behaviour == "no_data":
            return []
        if self.behaviour == "lost":
            missing = dict.fromkeys(
                ("util", "sm", "mem_used", "mem_total", "mem_reserved", "temp", "power_mw"), "gpu_lost"
            )
            return [[self.uuid, None, at, {}, missing, []]]
        total = int(self.report["memory_mib"])
        limit = int(self.report.get("power_limit_mw") or 300_000)
        busy = 0.0
        used = 4.0
        processes = []
        for job in self.jobs:
            share = job["share"]
            level = max(0.0, min(100.0, busy_percent(job["curve"], job["seed"], clock - job["since"], clock)))
            busy += level * share
            fill = min(1.0, (clock - job["since"]) / 20) * (0.55 + 0.38 * unit("memory", job["seed"]))
            job["memory"] = int(fill * share * (total - MEMORY_RESERVED_MIB))
            used += job["memory"]
            if job["memory"] > 100:
                user = job["user"] or "user"
                processes.append(
                    {
                        "pid": job["pid"],
                        "name": "python",
                        "user": user,
                        "mem_mib": job["memory"],
                        "allocation": job["allocation"],
                    }
                )
        busy = min(100.0, busy)
        idle = 0.13 + 0.03 * unit("idle", self.uuid)
        wanted = limit * (idle + (0.94 - idle) * (busy / 100) ** 0.8)
        self.power = wanted if not self.power else self.power + 0.5 * (wanted - self.power)
        warm = 29 + 4 * unit("room", self.uuid) + 43 * self.power / limit
        self.heat += 0.15 * (warm - self.heat)
        values: dict[str, Any] = {
            "util": round(busy),
            "mem_used": min(total, int(used)),
            "mem_total": total,
            "mem_reserved": MEMORY_RESERVED_MIB,
            "temp": round(self.heat),
            "power_mw": int(self.power),
            "power_limit_mw": limit,
        }
        missing = {"sm": "not_supported"}
        self._driver_facts(values, missing, busy, clock)
        if self.slices:
            del values["util"]
            missing["util"] = "not_supported"
        rows: list[list[Any]] = [[self.uuid, None, at, values, missing, processes]]
        for part in self.slices:
            memory = int(part.get("memory_mib") or total * int(part["size"]) // 8)
            inside = sum(job["memory"] for job in self.jobs if job["mig"] == part["uuid"])
            part_values = {"mem_used": min(memory, 20 + inside), "mem_total": memory, "mem_reserved": 0}
            part_missing = {"util": "not_supported", "sm": "not_supported"}
            inner = [
                process
                for process, job in zip(processes, [j for j in self.jobs if j["memory"] > 100])
                if job["mig"] == part["uuid"]
            ]
            rows.append([self.uuid, part["uuid"], at, part_values, part_missing, inner])
        return rows
