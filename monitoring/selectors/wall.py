"""What the wall's pages and endpoints show, read from the board of this process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from monitoring.engine.board import Board
from monitoring.engine.frames import NONE16, NONE32
from monitoring.engine.tiles import CODE, STATES
from monitoring.models import GpuState
from monitoring.selectors.access import may_see_holding
from pool.models import Allocation
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.units import from_ms, to_ms


def identity(board: Board) -> dict[str, Any]:
    """The list of cells that frames refer to by index, once, in the order of the wall.

    nodes: [site, model, node uid, name, schedulable, cards]; card: [number, GPU uid, watts limit, slices, slots];
    slice: [profile, first memory slot, slots]. Cells count cards and, right after each, its slices.
    """
    models: dict[str, int] = {}
    nodes = []
    for row in board.nodes:
        cards: list[list[Any]] = []
        for i in row.cells:
            cell = board.cells[i]
            slices = []
            k = i + 1
            while k < len(board.cells) and board.cells[k].gpu_id == cell.gpu_id:
                part = board.cells[k]
                slices.append([part.profile, part.start, part.size])
                k += 1
            card: list[Any] = [cell.number, cell.uid, cell.power_limit_w]
            cards.append([*card, slices, cell.slots] if slices else card)
        model = models.setdefault(row.model, len(models))
        nodes.append([row.site, model, row.uid, row.name, row.schedulable, cards])
    return {
        "version": board.version,
        "states": list(STATES),
        "sites": [[code, name] for _, code, name in board.sites],
        "models": list(models),
        "nodes": nodes,
    }


def identity_tag(board: Board) -> str:
    """ETag of `identity`: the version, and what people decided about nodes."""
    decided = "".join(row.schedulable[:2] for row in board.nodes) + "".join(row.name for row in board.nodes)
    return f'"{board.version:08x}-{zlib.crc32(decided.encode()):08x}"'


@dataclass(frozen=True)
class WallFilter:
    """What a reader asked to see; empty means all. `held`: cells of a department's leases, None for no filter."""

    site: str = ""
    model: str = ""
    state: str = ""
    q: str = ""
    held: frozenset[int] | None = None


def chosen(board: Board, wanted: WallFilter) -> list[int]:
    """Cards that match, in the order of the wall."""
    sites = {k for k, (_, code, _n) in enumerate(board.sites) if not wanted.site or code == wanted.site}
    text = wanted.q.strip().lower()
    nodes = {
        k
        for k, row in enumerate(board.nodes)
        if row.site in sites and (not wanted.model or row.model == wanted.model) and text in row.name.lower()
    }
    codes = board.columns["state"].tolist()
    return [
        i
        for i in board.cards()
        if board.cells[i].node in nodes
        and (not wanted.state or STATES[codes[i]] == wanted.state)
        and (wanted.held is None or i in wanted.held)
    ]


def held_cells(board: Board, policy: Policy, department_id: int) -> frozenset[int]:
    """Cells held by a department's subtree, as far as the reader may see who holds what."""
    subtree = set(policy.tree.subtree(department_id)) if department_id in policy.tree.rows else set()
    return frozenset(
        i
        for i, hold in enumerate(board.held)
        if hold.department_id in subtree
        and may_see_holding(policy, holder_id=hold.holder_id, department_id=hold.department_id)
    )


_SORTS: dict[str, Callable[[Board], Any]] = {
    "busy": lambda board: board.util,
    "sm": lambda board: board.sm,
    "mem": lambda board: board.mem_used,
    "temp": lambda board: board.temp,
    "power": lambda board: board.power,
}
SORTS = frozenset(_SORTS)


def ordered(board: Board, cells: list[int], sort: str) -> list[int]:
    """Cells by a measure (`-` first: largest first); cards without the measure come last either way."""
    name = sort.lstrip("-")
    if name not in _SORTS:
        return cells
    values, silent = _SORTS[name](board).tolist(), board.silent.tolist()
    sign = -1 if sort.startswith("-") else 1
    return sorted(cells, key=lambda i: (silent[i] or values[i] in (NONE16, NONE32), sign * int(values[i]), i))


def rows(board: Board, cells: Iterable[int], policy: Policy) -> list[dict[str, Any]]:
    """The table twin's rows: two queries whatever the number of rows."""
    wanted = list(cells)
    allocations = {
        a.pk: a
        for a in Allocation.objects.select_related("holder", "department").filter(
            pk__in={board.held[i].allocation_id for i in wanted if board.held[i].allocation_id}
        )
    }
    missing = {
        (s.gpu_id, s.slot): s.missing
        for s in GpuState.objects.filter(gpu_id__in={board.cells[i].gpu_id for i in wanted}).only(
            "gpu_id", "slot", "missing"
        )
    }
    now_ms = to_ms(now())
    out = []
    for i in wanted:
        cell, hold = board.cells[i], board.held[i]
        node = board.nodes[cell.node]
        allocation = allocations.get(hold.allocation_id)
        seen = allocation is not None and may_see_holding(
            policy, holder_id=allocation.holder_id, department_id=allocation.department_id
        )
        at = int(board.at[i])
        out.append(
            {
                "gpu_uid": cell.uid,
                "number": cell.number,
                "profile": cell.profile,
                "start": cell.start,
                "last_slot": cell.start + max(0, cell.size - 1),
                "node": node.name,
                "node_uid": node.uid,
                "model": node.model,
                "site": board.sites[node.site][2],
                "state": STATES[board.columns[i]["state"]],
                "measures": measures(board, i, missing.get((cell.gpu_id, cell.slot), {})),
                "allocation": allocation if seen else None,
                "hidden": allocation is not None and not seen,
                "at": from_ms(at) if at else None,
                "age_s": (now_ms - at) // 1000 if at else None,
                "stale": bool(board.columns[i]["flags"] & 1),
                "latched": bool(board.latched[i]),
                "limit_w": cell.power_limit_w or None,
            }
        )
    return out


def measures(board: Board, i: int, missing: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Each measure of a cell: `value` or None with a `reason` code. Where nothing measures it now none has a value."""
    silent = _silence(board, i)
    used, total = int(board.mem_used[i]), int(board.mem_total[i])
    values: dict[str, tuple[Any, str]] = {
        "busy": (_value(board.util[i], NONE16, 10), "util"),
        "sm": (_value(board.sm[i], NONE16, 10), "sm"),
        "mem": (None if used == NONE32 else used, "mem_used"),
        "mem_total": (None if total == NONE32 else total, "mem_total"),
        "temp": (_value(board.temp[i], NONE16), "temp"),
        "power": (_value(board.power[i], NONE32, 1000), "power_mw"),
    }
    if silent:
        return {name: {"value": None, "reason": silent} for name in values}
    return {
        name: {"value": value, "reason": "" if value is not None else missing.get(key, "not_reported")}
        for name, (value, key) in values.items()
    }


def _silence(board: Board, i: int) -> str:
    """Why nothing measures a cell now; empty where something does."""
    if not board.at[i]:
        return "no_sample"
    if not board.silent[i]:
        return ""
    return "lost" if board.columns[i]["state"] == CODE["lost"] else "stale"


def _value(raw: Any, none: int, scale: int = 1) -> float | int | None:
    if int(raw) == none:
        return None
    return int(raw) if scale == 1 else round(int(raw) / scale, 1)


def cells_of(board: Board, uid: UUID | str) -> list[int]:
    """The cell of a card and, after it, those of its slices; empty for a card that is not on the wall."""
    text = str(uid)
    return [i for i, cell in enumerate(board.cells) if cell.uid == text]


def cell_of(board: Board, uid: UUID | str, slot: int = 0) -> int | None:
    """The cell of a card (or slice) by the card's public id."""
    text = str(uid)
    return next((i for i, cell in enumerate(board.cells) if cell.uid == text and cell.slot == slot), None)
