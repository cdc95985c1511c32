"""A past played again: figures worked out by hand, and changes that do what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pool.engine.model import FlavourFacts, Gpu, Node, Policy, Request
from pool.engine.past import Piece, Played, Run, Setting, play
from pool.engine.past_changes import Changes, Limits, changed
from pool.engine.past_measures import measure
from pool.engine.past_trace import TraceError, events, trace_past
from pool.engine.replay_jobs import Job, replay
from quotas.engine.tree import QuotaNode

H = 3_600_000


def setting(nodes: int = 1, cards: int = 2, guarantees: tuple[int, int] = (1, 1)) -> Setting:
    """Departments 1 and 2 below the pool; `nodes` nodes of `cards` cards."""
    made = tuple(
        Node(n, f"n{n}", 1, "s", tuple(Gpu(10 * n + i, i, "f", 80_000) for i in range(cards)))
        for n in range(1, nodes + 1)
    )
    tree = (
        QuotaNode(0, guarantee=1000 * nodes * cards),
        *(QuotaNode(i, 0, guarantee=1000 * g) for i, g in enumerate(guarantees, 1)),
    )
    return Setting(made, (FlavourFacts("f", 80_000),), {"f": tree}, Policy())


def piece(
    number: int, department: int, at: int, needs: int, gpus: int = 1, leaves: int | None = None
) -> Piece:
    request = Request(number, department, ("f",), per_node=gpus, queued_at=at, duration_ms=needs)
    return Piece(request, at, needs, leaves)


STORY = [
    piece(1, 1, 0, 10 * H),  # starts at once
    piece(2, 1, 1 * H, 10 * H),  # borrows the card of department 2
    piece(3, 2, 4 * H, 2 * H),  # comes for its guarantee: 2 is taken back, and resumes at 6 h
    piece(4, 1, 5 * H, 1 * H, leaves=8 * H),  # finds no room and leaves
]


def test_a_day_by_hand() -> None:
    """Card by card: A 1 from 0 to 10 h. B 2 from 1 to 4, 3 from 4 to 6, 2 from 6 to 13 (3 + 7 = 10 h)."""
    played = play(STORY, setting(), 24 * H)
    runs = sorted(
        (run.request_id, run.start // H, run.end // H, run.ending, run.cause) for run in played.runs
    )
    assert runs == [
        (1, 0, 10, "finish", None),
        (2, 1, 4, "taken", "reclaim"),
        (2, 6, 13, "finish", None),
        (3, 4, 6, "finish", None),
    ]
    assert played.left == {4: 8 * H} and played.waiting == []
    found = measure(STORY, setting(), played, 0, 24 * H)
    one, two = found.groups[1, "f"], found.groups[2, "f"]
    assert (one.asked, one.started, one.waits, one.held) == (3, 2, [0, 0], 20 * H)
    assert (two.asked, two.started, two.waits, two.held) == (1, 1, [0], 2 * H)
    assert one.taken == {"reclaim": 1} and one.lost == 3 * H
    sums = found.flavours["f"]
    assert (sums.installed, sums.held) == (48 * H, 22 * H)
    # 1 holds the guarantee for ten hours; 2 is above it from 1 to 4 and 6 to 10, and within it from 10 to 13
    assert (sums.borrowed, sums.shortfall, sums.idle_wanted) == (7 * H, 0, 0)


def test_without_taking_back_the_owner_waits() -> None:
    changes = Changes(policy=Policy(reclaim=False))
    world = changed(setting(), changes)
    played = play(STORY, world, 24 * H)
    assert {(r.request_id, r.start // H, r.end // H) for r in played.runs} == {
        (1, 0, 10),
        (2, 1, 11),
        (3, 10, 12),
    }
    found = measure(STORY, world, played, 0, 24 * H)
    assert found.groups[2, "f"].waits == [6 * H]
    assert found.flavours["f"].shortfall == 6 * H
    assert found.flavours["f"].borrowed == 9 * H


def test_without_borrowing_cards_idle_while_wanted() -> None:
    world = changed(setting(), Changes(borrowing=False))
    played = play(STORY, world, 24 * H)
    assert {(r.request_id, r.start // H) for r in played.runs} == {(1, 0), (2, 10), (3, 4)}
    sums = measure(STORY, world, played, 0, 24 * H).flavours["f"]
    # card 2 stands idle from 1 to 4 and 6 to 10 while 2 wants it
    assert (sums.idle_wanted, sums.borrowed) == (7 * H, 0)


def test_the_window_cuts_what_lies_outside() -> None:
    played = play(STORY, setting(), 24 * H)
    found = measure(STORY, setting(), played, 4 * H, 7 * H)
    assert found.flavours["f"].held == 6 * H
    assert found.groups[1, "f"].asked == 1 and found.groups[1, "f"].taken == {"reclaim": 1}
    stopped = play(STORY, setting(), 5 * H)
    assert {(r.request_id, r.end // H, r.ending) for r in stopped.runs} == {
        (1, 5, None), (2, 4, "taken"), (3, 5, None),
    }  # fmt: skip
    assert stopped.waiting == [2]


def test_changes_of_fleet_and_quotas_reach_the_root() -> None:
    more = changed(setting(), Changes(nodes={"f": 2}, limits={(1, "f"): Limits(guarantee=3000, cap=5000)}))
    assert more.cards == {"f": 6}
    root, first, second = more.quotas["f"]
    assert (root.guarantee, first.guarantee, first.hard_cap, first.borrow_limit) == (6000, 3000, 5000, None)
    assert second == setting().quotas["f"][2]
    assert len({gpu.id for node in more.nodes for gpu in node.gpus}) == 6
    fewer = changed(more, Changes(nodes={"f": -2}))
    assert fewer.nodes == setting().nodes and fewer.quotas["f"][0].guarantee == 2000
    assert changed(setting(), Changes()) == setting()
    assert changed(setting(), Changes(nodes={"other": 3})).nodes == setting().nodes


def test_the_own_part_of_a_parent_and_its_children_add_up() -> None:
    """A parent with 3 of which a child has 1: the others below it share 2."""
    tree = (
        QuotaNode(0, guarantee=4000),
        QuotaNode(1, 0, guarantee=3000),
        QuotaNode(2, 1, guarantee=1000),
        QuotaNode(3, 1),
        QuotaNode(4, 0),
    )
    world = replace(setting(cards=4), quotas={"f": tree})
    runs = [
        Run(1, "f", "", 2000, 0, 10 * H, "finish"),  # the child: one above its own
        Run(2, "f", "", 1000, 0, 10 * H, "finish"),  # a sibling, within the parent's own
        Run(3, "f", "", 1000, 0, 10 * H, "finish"),  # nobody's guarantee: all borrowed
    ]
    pieces = [
        piece(1, 2, 0, 10 * H, 2), piece(2, 3, 0, 10 * H), piece(3, 4, 0, 10 * H), piece(4, 3, 2 * H, H),
    ]  # fmt: skip
    sums = measure(pieces, world, Played(runs), 0, 10 * H).flavours["f"]
    assert sums.borrowed == 20 * H
    assert sums.shortfall == 8 * H  # one of the parent's own two, wanted from 2 to 10
    assert sums.idle_wanted == 0


JOBS = [
    {"job_id": "a", "submit_time": "0", "duration": "36000", "gpu_num": "2", "vc": "x"},
    {"job_id": "b", "submit_time": "1.5", "duration": "100", "gpu_num": "1", "vc": "y"},
]
QUOTAS = [{"vc": "x", "nominal_gpus": "1"}, {"vc": "y", "nominal_gpus": "1"}]


def test_a_recorded_workload_gives_the_events_of_the_replay_command() -> None:
    trace = trace_past(JOBS, QUOTAS)
    played = play(trace.pieces, trace.setting)
    found = events(trace, played.runs)
    assert found == [
        (0, "a", "start"), (1500, "a", "preempt"), (1500, "b", "start"), (101_500, "b", "finish"),
        (101_500, "a", "start"), (36_100_000, "a", "finish"),
    ]  # fmt: skip
    jobs = [Job("a", 0, 36_000_000, 2, "x"), Job("b", 1500, 100_000, 1, "y")]
    same = [(event.at, event.job, event.kind) for event in replay(jobs, {"x": 1, "y": 1}).events]
    assert sorted(found) == sorted(same)


@pytest.mark.parametrize(
    ("which", "column", "value", "row"),
    [
        ("jobs", "gpu_num", "0", 2),
        ("jobs", "gpu_num", "-1", 2),
        ("jobs", "duration", "soon", 2),
        ("jobs", "submit_time", "1.x", 2),
        ("jobs", "vc", "", 2),
        ("jobs", "job_id", "a", 0),
        ("quotas", "nominal_gpus", "1.5", 2),
        ("quotas", "vc", "x", 2),
    ],
)
def test_a_row_that_makes_no_sense_is_named(which: str, column: str, value: str, row: int) -> None:
    jobs, quotas = [dict(line) for line in JOBS], [dict(line) for line in QUOTAS]
    (jobs if which == "jobs" else quotas)[1][column] = value
    with pytest.raises(TraceError) as error:
        trace_past(jobs, quotas)
    assert (error.value.row, error.value.column) == (row, column)


def test_more_cards_than_guarantees() -> None:
    trace = trace_past(JOBS, QUOTAS, more_cards=1)
    assert trace.setting.cards == {"gpu": 3} and trace.setting.quotas["gpu"][0].guarantee == 3000
    assert {run.ending for run in play(trace.pieces, trace.setting).runs} == {"finish"}
