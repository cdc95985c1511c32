"""Read the board from the database: identity in wall order, facts, last states. Four queries, whatever the size."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import structlog
from django.conf import settings
from django.db import DatabaseError, connections
from django.db.models import Exists, OuterRef

from monitoring.engine.board import Board, Cell, Holding, NodeRow
from monitoring.engine.frames import NONE16, NONE32
from monitoring.engine.tiles import TileFacts
from monitoring.models import GpuState
from pool.models import Gpu, Lease, MigSlice, Node, ReclaimCase, Reservation
from portal.kernel.clock import now
from portal.kernel.units import to_ms

log = structlog.get_logger(__name__)
_GPU = (
    "id",
    "uid",
    "index",
    "model_name",
    "node_id",
    "mig_enabled",
    "power_limit_mw",
    "flavour__code",
    "flavour__compute_slices",
    "flavour__memory_slices",
    "condition",
    "cordoned",
    "foreign_use",
    "node__uid",
    "node__name",
    "node__health",
    "node__schedulable",
    "node__simulated",
    "node__cluster__site_id",
    "node__cluster__site__code",
    "node__cluster__site__name",
)
_LEASE_ORDER = ("running", "starting", "reserved", "stopping")


def _cards() -> Any:
    return (
        Gpu.objects.exclude(condition=Gpu.Condition.RETIRED)
        .exclude(node__schedulable=Node.Schedulable.RETIRED)
        .order_by(
            "node__cluster__site__position",
            "node__cluster__site__name",
            "node__cluster__site_id",
            "model_name",
            "node__name",
            "index",
            "id",
        )
    )


def board_load() -> Board:
    """The whole board, with facts and last samples."""
    slices: dict[int, list[tuple[int, str, int, int, int]]] = {}
    parts_of = MigSlice.objects.filter(gone_at=None).order_by("gpu_id", "start")
    for gpu_id, instance, profile, start, size, compute in parts_of.values_list(
        "gpu_id", "gpu_instance", "profile", "start", "size", "compute_slices"
    ):
        slices.setdefault(gpu_id, []).append((instance, profile, start, size, compute))
    sites: dict[int, int] = {}
    site_rows: list[tuple[int, str, str]] = []
    nodes: dict[tuple[int, str], int] = {}
    board_nodes: list[NodeRow] = []
    cells: list[Cell] = []
    facts: list[TileFacts] = []
    held: list[Holding] = []
    for g in _cards().values_list(*_GPU):
        (
            gpu_id,
            uid,
            index,
            model,
            node_id,
            mig,
            limit,
            flavour,
            compute_slices,
            memory_slots,
            condition,
            cordoned,
            foreign,
            node_uid,
            node_name,
            health,
            schedulable,
            simulated,
            site_id,
            site_code,
            site_name,
        ) = g
        if site_id not in sites:
            sites[site_id] = len(site_rows)
            site_rows.append((site_id, site_code, site_name))
        key = (node_id, model)
        if key not in nodes:
            nodes[key] = len(board_nodes)
            board_nodes.append(
                NodeRow(
                    node_id,
                    str(node_uid),
                    node_name,
                    sites[site_id],
                    model,
                    flavour or "",
                    [],
                    schedulable,
                    health,
                    simulated,
                )
            )
        row = nodes[key]
        watts = round((limit or 0) / 1000)
        fact = TileFacts(condition, cordoned, health, schedulable, split=mig, foreign=bool(foreign))
        parts = slices.get(gpu_id, []) if mig else []
        board_nodes[row].cells.append(len(cells))
        card = Cell(
            gpu_id,
            0,
            str(uid),
            row,
            index,
            power_limit_w=watts,
            slices=compute_slices or 7,
            slots=memory_slots or 8,
        )
        cells.append(card)
        facts.append(fact)
        held.append(Holding())
        for instance, profile, start, size, compute in parts:
            cells.append(Cell(gpu_id, instance + 1, str(uid), row, index, profile, start, size, compute))
            facts.append(TileFacts(condition, cordoned, health, schedulable))
            held.append(Holding())
    board = Board(site_rows, board_nodes, cells, facts, held)
    _leases_into(board, None)
    _samples_into(board)
    board.refresh(to_ms(now()), everything=True)
    return board


def facts_reload(board: Board, gpu_ids: Iterable[int] | None = None) -> None:
    """Read conditions and leases again, of some cards or of all; identity is not touched."""
    wanted = None if gpu_ids is None else set(gpu_ids)
    cards = _cards() if wanted is None else Gpu.objects.filter(pk__in=wanted)
    rows = cards.values_list(
        "id", "condition", "cordoned", "foreign_use", "node__health", "node__schedulable", "mig_enabled"
    )
    by_gpu: dict[int, list[int]] = {}
    for i, cell in enumerate(board.cells):
        if wanted is None or cell.gpu_id in wanted:
            by_gpu.setdefault(cell.gpu_id, []).append(i)
    for gpu_id, condition, cordoned, foreign, health, schedulable, mig in rows:
        for i in by_gpu.get(gpu_id, ()):
            whole = board.cells[i].slot == 0
            board.facts[i] = TileFacts(
                condition, cordoned, health, schedulable, split=mig and whole, foreign=bool(foreign) and whole
            )
            board.held[i] = Holding()
            node = board.nodes[board.cells[i].node]
            node.schedulable, node.health = schedulable, health
            board.dirty.add(i)
    _leases_into(board, wanted)


def _leases_into(board: Board, gpu_ids: set[int] | None) -> None:
    moment = now()
    leases = Lease.objects.filter(ended_at=None).annotate(
        reclaim=Exists(ReclaimCase.objects.filter(allocation=OuterRef("allocation_id"), closed_at=None))
    )
    reservations = Reservation.objects.filter(cancelled_at=None, during__contains=moment)
    if gpu_ids is not None:
        leases, reservations = leases.filter(gpu_id__in=gpu_ids), reservations.filter(gpu_id__in=gpu_ids)
    for gpu_id, instance, state, since, charge, allocation, department, holder, reclaim in leases.order_by(
        "id"
    ).values_list(
        "gpu_id",
        "mig_slice__gpu_instance",
        "allocation__state",
        "started_at",
        "charge",
        "allocation_id",
        "allocation__department_id",
        "allocation__holder_id",
        "reclaim",
    ):
        card = board.index.get((gpu_id, 0))
        if card is None:
            continue
        board.held[card].charge += charge
        places = [card] if instance is None else [board.index.get((gpu_id, instance + 1))]
        for i in places:
            if i is None:
                continue
            fact = board.facts[i]
            if not fact.lease or _LEASE_ORDER.index(state) < _LEASE_ORDER.index(fact.lease):
                fact.lease, fact.reclaim, fact.held_since_ms = state, reclaim, to_ms(since)
                hold = board.held[i]
                hold.allocation_id, hold.department_id, hold.holder_id = allocation, department, holder
    for gpu_id in reservations.values_list("gpu_id", flat=True):
        i = board.index.get((gpu_id, 0))
        if i is not None:
            board.facts[i].reserved = True


def _samples_into(board: Board) -> None:
    rows = GpuState.objects.values_list(
        "gpu_id",
        "slot",
        "at",
        "quiet_since",
        "util_pm",
        "sm_pm",
        "temp_c",
        "mem_used_mib",
        "mem_total_mib",
        "power_mw",
        "latched",
    )
    for gpu_id, slot, at, quiet, util, sm, temp, used, total, power, latched in rows.iterator(
        chunk_size=5000
    ):
        i = board.index.get((gpu_id, slot))
        if i is None:
            continue
        board.at[i] = to_ms(at)
        board.quiet_since[i] = to_ms(quiet) if quiet else 0
        board.util[i] = NONE16 if util is None else util
        board.sm[i] = NONE16 if sm is None else sm
        board.temp[i] = NONE16 if temp is None else temp
        board.mem_used[i] = NONE32 if used is None else used
        board.mem_total[i] = NONE32 if total is None else total
        board.power[i] = NONE32 if power is None else power
        board.latched[i] = latched


_shared: tuple[float, Board] | None = None
_lock = threading.Lock()
FRESH_S = 3.0
USABLE_S = 30.0


def board_now() -> Board:
    """A board for pages, shared by the requests of this process. Read only.

    The hub keeps it fresh while anybody watches. Otherwise a page takes one that is up to half a minute old and has
    it read again behind its back, so that no page waits for the whole fleet to be read, except the first.
    """
    found = _shared
    age = time.monotonic() - found[0] if found is not None else USABLE_S
    if found is not None and age < FRESH_S:
        return found[1]
    if found is not None and age < USABLE_S and settings.GPUPOOL_ENV != "test":
        if not _lock.locked():
            threading.Thread(target=_reload_behind, name="board", daemon=True).start()
        return found[1]
    with _lock:
        found = _shared
        if found is not None and time.monotonic() - found[0] < FRESH_S:
            return found[1]
        return _reload()


def _reload() -> Board:
    board = board_load()
    board_share(board)
    return board


def _reload_behind() -> None:
    if not _lock.acquire(blocking=False):
        return
    try:
        _reload()
    except DatabaseError:
        log.warning("board_reload_failed")
    finally:
        _lock.release()
        connections.close_all()


def board_forget() -> None:
    """Forget the shared board (tests)."""
    global _shared
    _shared = None


def board_share(board: Board) -> None:
    """The hub keeps a board up to date: pages of this process may read that one."""
    global _shared
    _shared = (time.monotonic(), board)
