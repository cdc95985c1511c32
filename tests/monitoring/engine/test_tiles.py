"""The one function that names a tile's state, and the board that keeps all tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monitoring.engine import frames
from monitoring.engine.board import Board, Cell, Holding, NodeRow
from monitoring.engine.tiles import (
    CODE,
    IDLE_MS,
    NO_DATA_MS,
    STATES,
    TileFacts,
    is_silent,
    is_stale,
    tile_state,
)

NOW = 1_800_000_000_000
GOOD = TileFacts(health="ok")


def state(at: int = NOW - 1000, quiet: int = 0, **facts: object) -> str:
    return tile_state(replace(GOOD, **facts), at_ms=at, quiet_since_ms=quiet, now_ms=NOW)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "free"),
        ({"lease": "running"}, "in_use"),
        ({"lease": "reserved"}, "reserved"),
        ({"lease": "starting"}, "starting"),
        ({"lease": "stopping"}, "reclaiming"),
        ({"lease": "running", "reclaim": True}, "reclaiming"),
        ({"reserved": True}, "reserved"),
        ({"foreign": True}, "no_lease"),
        ({"condition": "suspect"}, "suspect"),
        ({"condition": "suspect", "lease": "running"}, "in_use"),
        ({"condition": "suspect", "cordoned": True}, "cordoned"),
        ({"health": "suspect"}, "suspect"),
        ({"cordoned": True}, "cordoned"),
        ({"schedulable": "cordoned"}, "cordoned"),
        ({"schedulable": "cordoned", "lease": "running"}, "in_use"),
        ({"schedulable": "draining", "lease": "running"}, "draining"),
        ({"schedulable": "draining"}, "cordoned"),
        ({"schedulable": "maintenance", "condition": "fault"}, "maintenance"),
        ({"condition": "fault", "lease": "running"}, "fault"),
        ({"condition": "vanished", "lease": "running"}, "lost"),
        ({"health": "lost", "lease": "running"}, "lost"),
        ({"split": True}, "split"),
    ],
)
def test_each_state(facts: dict[str, object], expected: str) -> None:
    assert state(**facts) == expected


def test_no_data_is_neither_free_nor_idle_p019_p063() -> None:
    assert state(at=0) == "no_data"
    assert state(at=NOW - NO_DATA_MS - 1, lease="running", quiet=NOW - 10 * IDLE_MS) == "no_data"
    assert state(at=NOW - NO_DATA_MS) == "free"


def test_idle_only_after_ten_quiet_minutes_of_this_holder() -> None:
    assert state(lease="running", quiet=NOW - IDLE_MS) == "idle"
    assert state(lease="running", quiet=NOW - IDLE_MS + 1) == "in_use"
    assert state(lease="running", quiet=NOW - 9 * IDLE_MS, held_since_ms=NOW - 1000) == "in_use"
    assert state(lease="running", quiet=0) == "in_use"
    assert state(lease="starting", quiet=NOW - 9 * IDLE_MS) == "starting"


def test_stale_by_age_of_each_card_g090() -> None:
    assert not is_stale(at_ms=NOW - 30_000, now_ms=NOW)
    assert is_stale(at_ms=NOW - 30_001, now_ms=NOW)
    assert not is_stale(at_ms=0, now_ms=NOW)


def board(cards: int = 3) -> Board:
    nodes = [NodeRow(1, "n", "sh-01", 0, "H800", "h800", list(range(cards)))]
    cells = [Cell(10 + i, 0, f"gpu-{i}", 0, i, power_limit_w=700) for i in range(cards)]
    return Board(
        [(1, "sh", "Shanghai")], nodes, cells, [replace(GOOD) for _ in cells], [Holding() for _ in cells]
    )


def record(gpu: int, at: int = NOW, **more: int) -> np.ndarray:
    out = np.zeros(1, dtype=frames.BUS)
    base = {
        "gpu": gpu,
        "at": at,
        "mem_used": 40_000,
        "mem_total": 80_000,
        "power": 300_499,
        "util": 505,
        "sm": frames.NONE16,
        "temp": 55,
    }
    for name, value in {**base, **more}.items():
        out[name] = value
    return out


def test_board_takes_newer_samples_only_and_says_what_changed() -> None:
    b = board()
    assert list(b.refresh(NOW, everything=True)) == [0, 1, 2] or b.columns["state"][0] == CODE["no_data"]
    assert [b.take(r).tolist() for r in (record(11), record(11, at=NOW - 5), record(99))] == [[1], [], []]
    assert list(b.refresh(NOW)) == [1]
    cell = b.columns[1]
    assert (cell["busy"], cell["sm"], cell["mem"], cell["temp"], cell["power"]) == (
        51,
        frames.NA8,
        50,
        55,
        300,
    )
    assert STATES[cell["state"]] == "free"
    assert list(b.refresh(NOW)) == []
    b.take(record(11, at=NOW + 1000, util=1, mem_used=frames.NONE32, temp=frames.NONE16, power=frames.NONE32))
    b.refresh(NOW + 1000)
    cell = b.columns[1]
    assert (cell["busy"], cell["mem"], cell["temp"], cell["power"]) == (
        1,
        frames.NA8,
        frames.NA8,
        frames.NA16,
    )


def test_ages_pass_by_themselves() -> None:
    b = board()
    b.take(record(10))
    b.refresh(NOW, everything=True)
    changed = b.refresh(NOW + 31_000, everything=True)
    assert list(changed) == [0] and b.columns[0]["flags"] & frames.FLAG_STALE
    assert STATES[b.columns[0]["state"]] == "free"
    assert (b.columns[0]["busy"], b.columns[0]["power"]) == (51, 300)
    b.facts[0].condition = "fault"
    b.dirty.add(0)
    b.refresh(NOW + 61_000, everything=True)
    broken = b.columns[0].copy()
    assert STATES[broken["state"]] == "fault"
    b.facts[0].condition = "ok"
    b.dirty.add(0)
    b.refresh(NOW + 61_000, everything=True)
    assert STATES[b.columns[0]["state"]] == "no_data"
    for cell in (broken, b.columns[0]):
        assert [cell[name] for name in ("busy", "sm", "mem", "temp")] == [frames.NA8] * 4
        assert cell["power"] == frames.NA16
    b.take(record(10, at=NOW + 62_000, util=0))
    b.refresh(NOW + 62_000)
    assert (b.columns[0]["busy"], b.columns[0]["power"]) == (0, 300)


def test_sums_add_up_to_what_is_installed() -> None:
    b = board(6)
    b.facts[0].lease, b.held[0].charge = "running", 1000
    b.facts[1].lease, b.held[1].charge = "running", 250
    b.facts[2].condition = "fault"
    b.facts[3].cordoned = True
    b.facts[4].foreign = True
    for gpu in range(10, 15):
        b.take(record(gpu))
    b.refresh(NOW, everything=True)
    s = b.sums()
    assert (s.installed, s.allocated, s.free, s.cordoned, s.outside, s.down) == (
        6000,
        1250,
        750,
        1000,
        1000,
        2000,
    )
    assert s.installed == s.allocated + s.free + s.stranded + s.cordoned + s.outside + s.maintenance + s.down
    assert s.with_data == 5, "a broken card that reports has data, too"


def test_stranded_of_a_split_card() -> None:
    nodes = [NodeRow(1, "n", "sh-01", 0, "A100", "a100", [0])]
    cells = [
        Cell(1, 0, "g", 0, 0),
        Cell(1, 2, "g", 0, 0, "3g.40gb", 0, 4, 3),
        Cell(1, 3, "g", 0, 0, "2g.20gb", 4, 2, 2),
    ]
    facts = [replace(GOOD, split=True), replace(GOOD, lease="running"), replace(GOOD)]
    b = Board([(1, "sh", "Shanghai")], nodes, cells, facts, [Holding(charge=428), Holding(), Holding()])
    b.take(record(1))
    b.refresh(NOW, everything=True)
    s = b.sums()
    assert (s.installed, s.allocated, s.stranded, s.free) == (1000, 428, 1000 - 428 - 285, 285)


def test_frames_round_trip_and_sizes() -> None:
    cells = np.zeros(2000, dtype=frames.CELLS)
    cells["busy"], cells["power"] = np.arange(2000) % 101, np.arange(2000)
    whole = frames.snapshot(cells, identity=7, number=41, at_ms=NOW)
    assert len(whole) == 24 + 4 + 8 * 2000
    back = frames.decode(whole)
    assert (back["kind"], back["identity"], back["number"], back["at_ms"]) == (frames.SNAPSHOT, 7, 41, NOW)
    assert (back["cells"] == cells).all()
    part = frames.delta(cells, np.array([3, 1999]), identity=7, number=42, at_ms=NOW)
    assert len(part) == 24 + 4 + 12 * 2
    back = frames.decode(part)
    assert list(back["index"]) == [3, 1999] and list(back["cells"]["power"]) == [3, 1999]
    beat = frames.decode(frames.head(frames.BEAT, identity=7, number=42, at_ms=NOW))
    assert beat["kind"] == frames.BEAT and beat["number"] == 42
    assert frames.bus_decode(frames.bus_facts(gpus=[1, 2])) == (frames.BUS_FACTS, {"gpus": [1, 2]})
    for broken in (b"", b"\x09x", b"\x01short"):
        with pytest.raises(ValueError):
            frames.bus_decode(broken)


def test_identity_changes_with_order_and_layout() -> None:
    assert board(3).version == board(3).version != board(4).version


def test_stranded_counts_the_compute_slices_of_that_card() -> None:
    """An A30 has four: 2g + 1g leave a quarter."""
    nodes = [NodeRow(1, "n", "bj-01", 0, "A30", "a30", [0])]
    card = Cell(1, 0, "g", 0, 0, slices=4, slots=4)
    cells = [card, Cell(1, 2, "g", 0, 0, "2g.12gb", 0, 2, 2), Cell(1, 3, "g", 0, 0, "1g.6gb", 2, 1, 1)]
    facts = [replace(GOOD, split=True), replace(GOOD), replace(GOOD)]
    b = Board([(1, "bj", "Beijing")], nodes, cells, facts, [Holding() for _ in cells])
    b.take(record(1))
    b.refresh(NOW, everything=True)
    assert (b.sums().stranded, b.sums().free) == (250, 750)


facts_of = st.builds(
    TileFacts,
    condition=st.sampled_from(["ok", "suspect", "fault", "vanished"]),
    cordoned=st.booleans(),
    health=st.sampled_from(["ok", "late", "suspect", "lost"]),
    schedulable=st.sampled_from(["open", "cordoned", "draining", "maintenance"]),
    lease=st.sampled_from(["", "reserved", "starting", "running", "stopping"]),
    reclaim=st.booleans(),
    reserved=st.booleans(),
    split=st.booleans(),
    foreign=st.booleans(),
    held_since_ms=st.sampled_from([0, NOW - IDLE_MS, NOW - 1000]),
)
moments = st.sampled_from(
    [0, NOW - NO_DATA_MS - 1, NOW - NO_DATA_MS, NOW - IDLE_MS, NOW - IDLE_MS + 1, NOW - 5]
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(tiles=st.lists(st.tuples(facts_of, moments, moments), min_size=1, max_size=12))
def test_all_tiles_at_once_have_the_states_that_each_has_by_itself(
    tiles: list[tuple[TileFacts, int, int]],
) -> None:
    cells = [Cell(k + 1, 0, f"u{k}", 0, k) for k in range(len(tiles))]
    node = NodeRow(1, "n", "n1", 0, "M", "m", list(range(len(cells))))
    b = Board([(1, "s", "S")], [node], cells, [facts for facts, _at, _q in tiles], [Holding() for _ in tiles])
    b.at[:] = [at for _facts, at, _quiet in tiles]
    b.quiet_since[:] = [quiet for _facts, _at, quiet in tiles]
    b.util[:] = 510
    b.refresh(NOW)
    alone = [tile_state(facts, at_ms=at, quiet_since_ms=quiet, now_ms=NOW) for facts, at, quiet in tiles]
    assert [STATES[code] for code in b.columns["state"].tolist()] == alone
    silent = [
        is_silent(state=state, at_ms=at, now_ms=NOW) for state, (_f, at, _q) in zip(alone, tiles, strict=True)
    ]
    assert b.silent.tolist() == silent
    taken = [bool(facts.lease) or facts.reserved for facts, _at, _q in tiles]
    assert (b.columns["flags"] & frames.FLAG_HELD != 0).tolist() == taken, "also where nothing is heard of it"
    assert (b.columns["busy"] == frames.NA8).tolist() == silent, "a number exactly where something measures"
    assert sum(b.counts().values()) == len(tiles)
    sums = b.sums()
    parts = (
        sums.allocated,
        sums.free,
        sums.stranded,
        sums.cordoned,
        sums.outside,
        sums.maintenance,
        sums.down,
    )
    assert sum(parts) == sums.installed == 1000 * len(tiles)


def test_several_samples_of_a_cell_in_one_message_are_taken_in_their_order() -> None:
    cells = [Cell(7, 0, "a", 0, 0), Cell(5, 3, "b", 0, 1)]
    node = NodeRow(1, "n", "n1", 0, "M", "m", [0, 1])
    b = Board([(1, "s", "S")], [node], cells, [TileFacts(), TileFacts()], [Holding(), Holding()])
    rows = np.zeros(4, frames.BUS)
    rows["gpu"], rows["slot"] = [7, 7, 5, 7], [0, 0, 3, 0]
    rows["at"] = [NOW, NOW + 10_000, NOW, NOW + 20_000]
    rows["quiet"], rows["util"] = [1, 0, 1, 1], [5, 900, 7, 6]
    assert b.take(rows).tolist() == [0, 1]
    assert b.quiet_since.tolist() == [NOW + 20_000, NOW]  # the busy one in between began a new quiet time
    assert b.util.tolist() == [6, 7]
    late = np.zeros(1, frames.BUS)
    late["gpu"], late["at"] = 7, NOW + 15_000
    assert b.take(late).tolist() == []
    assert b.util.tolist() == [6, 7]
