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
from monitoring.engine.tiles import (
    CODE,
    DOWN,
    NO_DATA_MS,
    STALE_MS,
    STATES,
    TileFacts,
    settled,
    states_at,
    tile_state,
)

HOLE_MS = 300_000
_SLOTS = 1 << 16
"""Keys of cells are card × this + slot, so that samples find theirs by bisection."""


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
        self.gpu_ids = np.fromiter((c.gpu_id for c in self.cells), np.int64, n)
        slots = np.fromiter((c.slot for c in self.cells), np.int64, n)
        self.is_card = slots == 0
        keys = self.gpu_ids * _SLOTS + slots
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
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
        # What facts alone decide, worked out where they changed (`dirty`), and where a sample came (`moved`)
        self.strong = np.zeros(n, np.uint8)
        self.weak = np.zeros(n, np.uint8)
        self.held_since = np.zeros(n, np.int64)
        self.taken = np.zeros(n, bool)
        self.dirty: set[int] = set(range(n))
        self.moved = np.zeros(n, bool)
        text = "|".join(f"{c.uid}:{c.slot}:{c.profile}:{c.start}" for c in self.cells)
        self.version = zlib.crc32(text.encode())

    def take(self, records: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Take samples of the bus (`frames.BUS`); older than the last one are left out. Returns the cells changed.

        Records of one cell are taken in their order, all others at once.
        """
        changed: list[npt.NDArray[np.int64]] = []
        while len(records):
            cells = self._find(records)
            known = cells >= 0
            records, cells = records[known], cells[known]
            _values, first = np.unique(cells, return_index=True)
            changed.append(self._take_once(records[first], cells[first]))
            if len(first) == len(records):
                break
            rest = np.ones(len(records), bool)
            rest[first] = False
            records = records[rest]
        return np.unique(np.concatenate(changed)) if changed else np.zeros(0, np.int64)

    def _find(self, records: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The cell of each record; −1 for one that is not on the board."""
        if not len(self._keys):
            return np.full(len(records), -1, np.int64)
        slots = records["slot"].astype(np.int64)
        keys = records["gpu"] * _SLOTS + slots
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        fits = (self._keys[places] == keys) & (slots >= 0) & (slots < _SLOTS)
        return np.where(fits, self._order[places], -1)

    def _take_once(self, records: npt.NDArray[Any], cells: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Records of cells that differ from one another."""
        newer = records["at"] >= self.at[cells]
        records, cells = records[newer], cells[newer]
        at, before, since = records["at"], self.at[cells], self.quiet_since[cells]
        begins = (since == 0) | (at - before > HOLE_MS)
        self.quiet_since[cells] = np.where(records["quiet"] & 3 != 1, 0, np.where(begins, at, since))
        self.at[cells] = at
        for name in ("util", "sm", "temp", "mem_used", "mem_total", "power", "procs"):
            getattr(self, name)[cells] = records[name]
        self.latched[cells] = records["quiet"] & 4 != 0
        self.moved[cells] = True
        return cells

    @property
    def silent(self) -> npt.NDArray[np.bool_]:
        """Cells that nothing measured at the last `refresh`, as `tiles.is_silent`."""
        silent: npt.NDArray[np.bool_] = self.columns["flags"] & frames.FLAG_SILENT != 0
        return silent

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

    def _settle(self) -> None:
        """Work out again what the facts of dirty cells decide by themselves."""
        for i in self.dirty:
            fact = self.facts[i]
            self.strong[i], self.weak[i] = settled(fact)
            self.held_since[i] = fact.held_since_ms
            self.taken[i] = bool(fact.lease) or fact.reserved
        self.moved[list(self.dirty)] = True
        self.dirty.clear()

    def refresh(self, now_ms: int, *, everything: bool = False) -> npt.NDArray[np.int64]:
        """Work out the frame columns of cells with news (or of all: ages pass by themselves); returns what differs."""
        if self.dirty:
            self._settle()
        which = np.arange(len(self.cells)) if everything else np.flatnonzero(self.moved)
        self.moved[:] = False
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
        at = self.at[which]
        fresh["state"] = states_at(
            strong=self.strong[which],
            weak=self.weak[which],
            held_since_ms=self.held_since[which],
            at_ms=at,
            quiet_since_ms=self.quiet_since[which],
            now_ms=now_ms,
        )
        silent = (at <= 0) | (now_ms - at > NO_DATA_MS) | (fresh["state"] == CODE["lost"])
        for name in ("busy", "sm", "mem", "temp"):
            fresh[name][silent] = frames.NA8
        fresh["power"][silent] = frames.NA16
        stale = (at > 0) & (now_ms - at > STALE_MS)
        flags = stale * frames.FLAG_STALE + self.latched[which] * frames.FLAG_LATCHED
        fresh["flags"] = flags + silent * frames.FLAG_SILENT + self.taken[which] * frames.FLAG_HELD
        self.columns[which] = fresh
        different: npt.NDArray[np.int64] = which[before != fresh]
        return different

    def cards(self) -> Iterable[int]:
        """Cells that are whole cards."""
        found: list[int] = np.flatnonzero(self.is_card).tolist()
        return found

    def counts(self) -> dict[str, int]:
        """Cards by state (of the last `refresh`)."""
        found = np.bincount(self.columns["state"][self.is_card], minlength=len(STATES))
        return dict(zip(STATES, found.tolist(), strict=True))

    def sums(self, chosen: Iterable[int] | None = None) -> Sums:
        """The sums of these cards (all of them by default), by the states of the last `refresh`."""
        cards = np.flatnonzero(self.is_card) if chosen is None else np.fromiter(chosen, np.int64)
        columns = self.columns[cards]  # one copy: the hub writes while pages read
        state, measured = columns["state"], columns["flags"] & frames.FLAG_SILENT == 0
        charge = np.fromiter((self.held[i].charge for i in cards), np.int64, len(cards))
        charge = np.minimum(charge, 1000)
        silent = state == CODE["no_data"]
        broken = np.isin(state, [CODE[name] for name in DOWN])
        # A card that is suspect takes no new work until it is judged.
        down = broken | (silent & (charge == 0)) | (state == CODE["suspect"])
        whole = {name: state == CODE[name] for name in ("maintenance", "cordoned", "no_lease")}
        works = ~(down | whole["maintenance"] | whole["cordoned"] | whole["no_lease"])
        split = cards[works & (state == CODE["split"])]
        stranded = sum(self.stranded(int(i)) for i in split)
        allocated = int(charge[works].sum())
        return Sums(
            installed=1000 * len(cards),
            allocated=allocated,
            free=1000 * int(works.sum()) - allocated - stranded,
            stranded=stranded,
            cordoned=1000 * int(whole["cordoned"].sum()),
            outside=1000 * int(whole["no_lease"].sum()),
            maintenance=1000 * int(whole["maintenance"].sum()),
            down=1000 * int(down.sum()),
            with_data=int(measured.sum()),
        )

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
