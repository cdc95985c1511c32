"""The durable queue: order, restart, bounds, acknowledgements."""

from __future__ import annotations

import json
import time
from pathlib import Path

from pool.agent.logtail import PIECE, LogTail, whole_text
from pool.agent.outbox import SEGMENT_BYTES, Outbox


def drain(outbox: Outbox) -> list[dict]:
    found = []
    while (text := outbox.next()) is not None:
        found.append(json.loads(text))
    return found


def test_vital_messages_go_first_in_order_and_survive_a_restart(tmp_path: Path) -> None:
    box = Outbox(str(tmp_path))
    box.put({"t": "samples", "rows": []})
    seqs = [box.put({"t": "log", "data": f"第 {i} 行"}) for i in range(3)]
    assert [m["t"] for m in drain(box)] == ["log", "log", "log", "samples"]
    box.acknowledge(seqs[1])
    box.close()
    again = Outbox(str(tmp_path))
    left = drain(again)
    # What was acknowledged may come again after a restart; what was not must, in order.
    assert [m["seq"] for m in left if m["t"] == "log" and m["seq"] != seqs[1]] == [seqs[0], seqs[2]]
    assert again.put({"t": "job"}) > max(m["seq"] for m in left)


def test_numbers_never_repeat_even_when_the_folder_was_lost(tmp_path: Path) -> None:
    first = Outbox(str(tmp_path / "a"))
    used = [first.put({"t": "job"}) for _ in range(50)]
    time.sleep(0.2)
    fresh = Outbox(str(tmp_path / "b"))
    assert fresh.put({"t": "job"}) > max(used)


def test_samples_are_bounded_the_oldest_go_and_are_counted_but_jobs_stay(tmp_path: Path) -> None:
    box = Outbox(str(tmp_path), max_sample_bytes=2 * SEGMENT_BYTES)
    for i in range(60):
        box.put({"t": "samples", "rows": [["x" * 20_000, i]]})
        box.put({"t": "job", "n": i})
    assert box.samples.size <= 2 * SEGMENT_BYTES + 21_000
    assert box.samples.dropped > 20 and box.vital.waiting == 60
    newest = [m["rows"][0][1] for m in drain(box) if m["t"] == "samples"]
    assert newest == sorted(newest) and newest[-1] == 59


def test_a_window_limits_what_is_in_flight_and_a_new_connection_sends_again(tmp_path: Path) -> None:
    box = Outbox(str(tmp_path))
    seqs = [box.put({"t": "event", "n": i}) for i in range(100)]
    assert [m["seq"] for m in drain(box)] == seqs[: Outbox.WINDOW]
    for seq in seqs[:10]:
        box.acknowledge(seq)
    assert [m["seq"] for m in drain(box)] == seqs[Outbox.WINDOW : Outbox.WINDOW + 10]
    box.rewind()
    assert [m["seq"] for m in drain(box)] == seqs[10 : 10 + Outbox.WINDOW]
    for seq in seqs:
        box.acknowledge(seq)
    assert drain(box) == [] and box.vital.waiting == 0
    box.put({"t": "event", "n": 100})
    assert [m["n"] for m in drain(box)] == [100]


def test_a_torn_last_line_is_dropped_and_the_rest_is_kept(tmp_path: Path) -> None:
    box = Outbox(str(tmp_path))
    box.put({"t": "job", "n": 1})
    box.close()
    file = next((tmp_path / "vital").iterdir())
    with open(file, "ab") as handle:
        handle.write(b'{"t":"job","n":2,"se')
    again = Outbox(str(tmp_path))
    assert [m["n"] for m in drain(again)] == [1]


def test_a_character_cut_at_the_end_waits_for_its_rest(tmp_path: Path) -> None:
    assert whole_text("好".encode()[:2], False) == (0, "")
    assert whole_text("好".encode()[:2], True) == (2, "\ufffd")
    assert whole_text(b"a\x00\xffb", False) == (4, "a\ufffd\ufffdb")
    file = tmp_path / "log"
    file.write_bytes(("好" * PIECE).encode())
    tail = LogTail(str(file), 0, 1 << 20)
    pieces = list(tail.read(final=True))
    assert "".join(text for _, _, text in pieces) == "好" * PIECE
    assert [offset for offset, _, _ in pieces] == [sum(p[1] for p in pieces[:i]) for i in range(len(pieces))]
    bounded = LogTail(str(file), 0, 300)
    assert sum(size for _, size, _ in bounded.read(final=True)) == 300 and bounded.offset == 300
