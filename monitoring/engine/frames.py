"""Binary layouts: the bus between processes, and the frames of the wall. Little endian throughout.

Bus (channel `gpupool:telemetry`): one byte of kind, then the payload.
  1  samples: packed records of `BUS`
  2  facts changed: JSON {"gpus": [id…]} or {"inventory": true}

Wall frame, version 1 (the head is that of static/js/live.mjs):
  u8 version=1 · u8 kind (0 snapshot, 1 delta, 2 beat) · u16 0 · u32 identity · u64 number · f64 data time (ms)
  snapshot: u32 n, then columns of n cells in index order; delta: u32 n, u32 index[n], then the columns:
  u16 power_w (65535 N/A) · u8 state · u8 flags · u8 busy_pct · u8 sm_pct · u8 mem_pct · u8 temp_c
  (each u8 measure: 255 N/A). Flags: 1 stale, 2 latched, 4 nothing measures it now, 8 somebody has it, whatever its
  state is. `identity` is the version of the list of cells that the indexes refer to: a frame of
  another version asks the reader to fetch the list again.
A snapshot of 2,000 cells is 16 kB, a delta costs 12 bytes a cell that changed.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

VERSION = 1
SNAPSHOT, DELTA, BEAT = 0, 1, 2
HEAD = struct.Struct("<BBHIQd")
NA8, NA16 = 255, 65535

BUS_SAMPLES, BUS_FACTS = 1, 2
NONE16, NONE32 = -32768, -1
BUS = np.dtype(
    [
        ("gpu", "<i8"),
        ("at", "<i8"),
        ("mem_used", "<i4"),
        ("mem_total", "<i4"),
        ("power", "<i4"),
        ("slot", "<i2"),
        ("util", "<i2"),
        ("sm", "<i2"),
        ("temp", "<i2"),
        ("procs", "<i2"),
        ("quiet", "<i2"),
    ]
)

COLUMNS = (
    ("power", "<u2"),
    ("state", "u1"),
    ("flags", "u1"),
    ("busy", "u1"),
    ("sm", "u1"),
    ("mem", "u1"),
    ("temp", "u1"),
)
CELLS = np.dtype([(name, kind) for name, kind in COLUMNS])
FLAG_STALE, FLAG_LATCHED, FLAG_SILENT, FLAG_HELD = 1, 2, 4, 8


def bus_samples(rows: npt.NDArray[Any]) -> bytes:
    """A message with records of `BUS`."""
    return bytes([BUS_SAMPLES]) + rows.tobytes()


def bus_facts(**facts: Any) -> bytes:
    """A message that tells of changed facts."""
    return bytes([BUS_FACTS]) + json.dumps(facts, separators=(",", ":")).encode()


def bus_decode(message: bytes) -> tuple[int, Any]:
    """(kind, records or facts). ValueError for a message that is cut or of an unknown kind."""
    if not message:
        raise ValueError("empty message")
    if message[0] == BUS_SAMPLES:
        return BUS_SAMPLES, np.frombuffer(message, dtype=BUS, offset=1)
    if message[0] == BUS_FACTS:
        return BUS_FACTS, json.loads(message[1:])
    raise ValueError(f"unknown kind {message[0]}")


def head(kind: int, *, identity: int, number: int, at_ms: float) -> bytes:
    """The first 24 bytes of a frame."""
    return HEAD.pack(VERSION, kind, 0, identity, number, at_ms)


def snapshot(cells: npt.NDArray[Any], *, identity: int, number: int, at_ms: float) -> bytes:
    """All cells in index order."""
    parts = [head(SNAPSHOT, identity=identity, number=number, at_ms=at_ms), struct.pack("<I", len(cells))]
    parts += [cells[name].tobytes() for name, _ in COLUMNS]
    return b"".join(parts)


def delta(
    cells: npt.NDArray[Any], index: npt.NDArray[Any], *, identity: int, number: int, at_ms: float
) -> bytes:
    """The cells at `index` only; an empty index is a beat in all but name and keeps the numbers without gaps."""
    parts = [head(DELTA, identity=identity, number=number, at_ms=at_ms), struct.pack("<I", len(index))]
    parts.append(index.astype("<u4").tobytes())
    chosen = cells[index]
    parts += [chosen[name].tobytes() for name, _ in COLUMNS]
    return b"".join(parts)


def decode(frame: bytes) -> dict[str, Any]:
    """The content of a frame, for tests and tools: {kind, identity, number, at_ms, index, cells}."""
    version, kind, _, identity, number, at_ms = HEAD.unpack_from(frame)
    if version != VERSION:
        raise ValueError(f"frame of version {version}")
    out: dict[str, Any] = {"kind": kind, "identity": identity, "number": number, "at_ms": at_ms}
    if kind == BEAT:
        return out
    (n,) = struct.unpack_from("<I", frame, HEAD.size)
    offset = HEAD.size + 4
    out["index"] = np.arange(n, dtype=np.uint32)
    if kind == DELTA:
        out["index"] = np.frombuffer(frame, dtype="<u4", count=n, offset=offset)
        offset += 4 * n
    cells = np.zeros(n, dtype=CELLS)
    for name, code in COLUMNS:
        cells[name] = np.frombuffer(frame, dtype=code, count=n, offset=offset)
        offset += n * np.dtype(code).itemsize
    out["cells"] = cells
    return out
