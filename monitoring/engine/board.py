"""All tiles of the pool at one moment, in index order: identity, facts, last measures, states, frame columns.

One board lives in each web process: the hub feeds it from the bus, pages read sums from it. Cells stand in the
order of the wall (site, model, node, index); a split card is followed by its slices. `version` is a checksum of
identity and order: an index means something only together with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from monitoring.engine import frames
from monitoring.engine.tiles import CODE, DOWN, STATES, TileFacts, is_stale, tile_state


@dataclass(slots=True)
class Cell:
    """Identity of one tile: a card (slot 0) or one of its MIG slices.

    Of a slice: `start` and `size` in memory slots, `compute` slices. Of a card that can be split: how many compute
    `slices` and memory `slots` it has (an A30 has 4 of each, the others 7 and 8).
    """

    gpu_id: int
    slot: int
    uid: str
    node: int
    number: int
    profile: str = ""
    start: int = 0
    size: int = 0
    compute: int = 0
    power_limit_w: int = 0
    slices: int = 7
    slots: int = 8


@dataclass(slots=True)
class NodeRow:
    """Identity of one node on the wall."""

    id: int
    uid: str
    name: str
    site: int
    model: str
    flavour: str
    cells: list[int] = field(default_factory=list)
    schedulable: str = "open"
    health: str = "unknown"
    simulated: bool = False


@dataclass(slots=True)
class Holding:
    """Who holds a cell: ids only; names are asked per reader. `charge`: milli-GPU of open leases on the card."""

    allocation_id: int = 0
    department_id: int = 0
    holder_id: int = 0
    charge: int = 0


@dataclass(frozen=True, slots=True)
class Sums:
    """What is installed, in milli-GPU, as parts that add up: each card stands in exactly one of them.

    `allocated`, `free` and `stranded` split the cards that can work; the others hold whole cards.
    """

    installed: int
    allocated: int
    free: int
    stranded: int
    cordoned: int
    outside: int
    maintenance: int
    down: int
    with_data: int


@dataclass
class Board:
    """See the module. Arrays are indexed by cell; −1 or −32768 is a missing measure, 0 in `at` no sample yet."""

    sites: list[tuple[int, str, str]]
    nodes: list[NodeRow]
    cells: list[Cell]
    facts: list[TileFacts]
    held: list[Holding]

    def __post_init__(self) -> None:
        n = len(self.cells)
        self.index: dict[tuple[int, int], int] = {(c.gpu_id, c.slot): i for i, c in enumerate(self.cells)}
        self.at = np.zeros(n, np.int64)
        self.quiet_since = np.zeros(n, np.int64)
        self.util = np.full(n, frames.NONE16, np.int16)
        self.sm = np.full(n, frames.NONE16, np.int16)
        self.temp = np.full(n, frames.NONE16, np.int16)
        self.mem_used = np.full(n, frames.NONE32, np.int32)
        self.mem_total = np.full(n, frames.NONE32, np.int32)
        self.power = np.full(n, frames.NONE32, np.int32)
        self.procs = np.zeros(n, np.int16)
        self.latched = np.zeros(n, bool)
        self.columns = np.zeros(n, frames.CELLS)
        self.dirty: set[int] = set(range(n))
        text = "|".join(f"{c.uid}:{c.slot}:{c.profile}:{c.start}" for c in self.cells)
        self.version = zlib.crc32(text.encode())

    def take(self, records: npt.NDArray[Any]) -> list[int]:
        """Take samples of the bus (`frames.BUS`); older than the last one are left out. Returns the cells changed."""
        changed = []
        for record in records:
            i = self.index.get((int(record["gpu"]), int(record["slot"])))
            at = int(record["at"])
            if i is None or at < self.at[i]:
                continue
            quiet = int(record["quiet"])
            if quiet & 3 != 1:
                self.quiet_since[i] = 0
            elif not self.quiet_since[i] or at - self.at[i] > 300_000:
                self.quiet_since[i] = at
            self.at[i] = at
            for name in ("util", "sm", "temp", "mem_used", "mem_total", "power", "procs"):
                getattr(self, name)[i] = record[name]
            self.latched[i] = bool(quiet & 4)
            changed.append(i)
        self.dirty.update(changed)
        return changed

    @property
    def measures_sm(self) -> bool:
        """Whether any cell has SM activity."""
        return bool((self.sm != frames.NONE16).any())

    def newest_at(self) -> int:
        """Time of the newest sample, ms; 0 where there is none."""
        return int(self.at.max()) if len(self.at) else 0

    def state_of(self, i: int, now_ms: int) -> str:
        """The state of one cell now."""
        return tile_state(
            self.facts[i], at_ms=int(self.at[i]), quiet_since_ms=int(self.quiet_since[i]), now_ms=now_ms
        )

    def refresh(self, now_ms: int, *, everything: bool = False) -> npt.NDArray[np.int64]:
        """Work out the frame columns of dirty cells (or of all: ages pass by themselves); returns what differs."""
        which = np.arange(len(self.cells)) if everything else np.array(sorted(self.dirty), dtype=np.int64)
        self.dirty.clear()
        if not len(which):
            return which
        before = self.columns[which].copy()
        fresh = self.columns[which]
        fresh["busy"] = _percent(self.util[which])
        fresh["sm"] = _percent(self.sm[which])
        fresh["mem"] = _share(self.mem_used[which], self.mem_total[which])
        temp = self.temp[which]
        fresh["temp"] = np.where(temp == frames.NONE16, frames.NA8, np.clip(temp, 0, 254))
        power = self.power[which]
        fresh["power"] = np.where(power < 0, frames.NA16, np.clip((power + 500) // 1000, 0, 65534))
        flags = np.zeros(len(which), np.uint8)
        states = np.zeros(len(which), np.uint8)
        for k, i in enumerate(which):
            states[k] = CODE[self.state_of(int(i), now_ms)]
            stale = is_stale(at_ms=int(self.at[i]), now_ms=now_ms)
            flags[k] = (frames.FLAG_STALE if stale else 0) | (frames.FLAG_LATCHED if self.latched[i] else 0)
        fresh["state"], fresh["flags"] = states, flags
        self.columns[which] = fresh
        different: npt.NDArray[np.int64] = which[before != fresh]
        return different

    def cards(self) -> Iterable[int]:
        """Cells that are whole cards."""
        return (i for i, cell in enumerate(self.cells) if cell.slot == 0)

    def counts(self) -> dict[str, int]:
        """Cards by state (of the last `refresh`)."""
        codes = self.columns["state"].tolist()
        out = dict.fromkeys(STATES, 0)
        for i in self.cards():
            out[STATES[codes[i]]] += 1
        return out

    def sums(self, chosen: Iterable[int] | None = None) -> Sums:
        """The sums of these cards (all of them by default), by the states of the last `refresh`."""
        part = dict.fromkeys(
            ("allocated", "free", "stranded", "cordoned", "outside", "maintenance", "down"), 0
        )
        cards = with_data = 0
        codes, seen = self.columns["state"].tolist(), self.at.tolist()
        for i in self.cards() if chosen is None else chosen:
            cards += 1
            state = STATES[codes[i]]
            with_data += seen[i] > 0 and state != "no_data" and state not in DOWN
            charge = min(1000, self.held[i].charge)
            if state in DOWN or (state == "no_data" and not charge):
                part["down"] += 1000
            elif state == "maintenance":
                part["maintenance"] += 1000
            elif state == "cordoned":
                part["cordoned"] += 1000
            elif state == "suspect":
                part["down"] += 1000  # takes no new work until it is judged
            elif state == "no_lease":
                part["outside"] += 1000
            else:
                stranded = self.stranded(i) if state == "split" else 0
                part["allocated"] += charge
                part["stranded"] += stranded
                part["free"] += 1000 - charge - stranded
        return Sums(installed=1000 * cards, with_data=with_data, **part)

    def stranded(self, i: int) -> int:
        """Milli-GPU of a split card that its layout leaves to nobody, by compute slices."""
        used = 0
        k = i + 1
        while k < len(self.cells) and self.cells[k].gpu_id == self.cells[i].gpu_id:
            used += 1000 * self.cells[k].compute // self.cells[i].slices
            k += 1
        return max(0, 1000 - max(used, min(1000, self.held[i].charge)))


def _percent(per_mille: npt.NDArray[np.int16]) -> npt.NDArray[Any]:
    """Per mille as whole percent, rounded half up; a value above 0 never shows as 0."""
    rounded = (per_mille.astype(np.int32) + 5) // 10
    rounded = np.where((per_mille > 0) & (rounded == 0), 1, rounded)
    return np.where(per_mille == frames.NONE16, frames.NA8, np.clip(rounded, 0, 254))


def _share(used: npt.NDArray[np.int32], total: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
    ok = (used >= 0) & (total > 0)
    share = np.zeros(len(used), np.int64)
    np.divide(
        used.astype(np.int64) * 200 + total, 2 * total.astype(np.int64), out=share, where=ok, casting="unsafe"
    )
    return np.where(ok, np.clip(share, 0, 254), frames.NA8)
