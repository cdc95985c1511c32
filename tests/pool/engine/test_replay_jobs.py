"""Replay of jobs under quotas: borrowing, reclaim, and work that goes on where it stopped."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pool.engine.model import Policy
from pool.engine.replay_jobs import Event, Job, replay

S = 1000


def test_a_borrower_gives_way_to_an_owner_and_goes_on_where_it_stopped() -> None:
    jobs = [
        Job("long", 0, 100 * S, 4, "b"),
        Job("more", 1 * S, 100 * S, 4, "b"),
        Job("mine", 10 * S, 20 * S, 4, "a"),
    ]
    outcome = replay(jobs, {"a": 4, "b": 4})
    assert outcome.events == [
        Event(0, "long", "start"),
        Event(1 * S, "more", "start"),
        Event(10 * S, "more", "preempt"),
        Event(10 * S, "mine", "start"),
        Event(30 * S, "mine", "finish"),
        Event(30 * S, "more", "start"),
        Event(100 * S, "long", "finish"),
        Event(121 * S, "more", "finish"),
    ]
    assert (outcome.preemptions, outcome.lost_gpu_ms) == (1, 4 * 9 * S)


def test_an_owner_waits_a_moment_for_one_card_and_displaces_nobody_where_one_comes_free() -> None:
    jobs = [
        Job("soon", 0, 15 * S, 1, "b"),
        Job("long", 0, 300 * S, 1, "b"),
        Job("mine", 10 * S, 5 * S, 1, "a"),
        Job("again", 30 * S, 5 * S, 1, "a"),
        Job("late", 200 * S, 5 * S, 1, "a"),
        Job("fill", 2 * S, 400 * S, 1, "b"),
    ]
    outcome = replay(jobs, {"a": 1, "b": 1}, Policy(reclaim_patience_ms=60 * S))
    assert outcome.events == [
        Event(0, "long", "start"),
        Event(0, "soon", "start"),
        Event(15 * S, "soon", "finish"),
        Event(15 * S, "mine", "start"),  # the card that comes free is the owner's, though others came before
        Event(20 * S, "mine", "finish"),
        Event(20 * S, "fill", "start"),
        Event(90 * S, "fill", "preempt"),  # nothing came free in a minute
        Event(90 * S, "again", "start"),
        Event(95 * S, "again", "finish"),
        Event(95 * S, "fill", "start"),
        Event(200 * S, "fill", "preempt"),  # what has run so long is not expected to end soon: no waiting
        Event(200 * S, "late", "start"),
        Event(205 * S, "late", "finish"),
        Event(205 * S, "fill", "start"),
        Event(300 * S, "long", "finish"),
        Event(430 * S, "fill", "finish"),
    ]
    assert replay(jobs, {"a": 1, "b": 1}).preemptions == 3


def test_beyond_its_guarantee_nobody_is_displaced() -> None:
    jobs = [Job("one", 0, 50 * S, 8, "b"), Job("five", 5 * S, 5 * S, 5, "a")]
    assert [event.kind for event in replay(jobs, {"a": 4, "b": 4}).events] == [
        "start",
        "finish",
        "start",
        "finish",
    ]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 60), st.integers(1, 6), st.sampled_from("abc")),
        min_size=1,
        max_size=25,
    )
)
def test_cards_suffice_all_jobs_run_their_time_and_no_owner_waits(
    rows: list[tuple[int, int, int, str]],
) -> None:
    guarantees = {"a": 4, "b": 2, "c": 0}
    jobs = {
        str(n): Job(str(n), at * S, length * S, gpus, who) for n, (at, length, gpus, who) in enumerate(rows)
    }
    outcome = replay(jobs.values(), guarantees)
    running: dict[str, int] = {}
    ran = dict.fromkeys(jobs, 0)
    for place, event in enumerate(outcome.events):
        job = jobs[event.job]
        if event.kind == "start":
            assert event.at >= job.submitted
            running[event.job] = event.at
        else:
            ran[event.job] += event.at - running.pop(event.job)
        following = outcome.events[place + 1].at if place + 1 < len(outcome.events) else event.at + 1
        if following > event.at:
            used = {
                who: sum(jobs[one].gpus for one in running if jobs[one].department == who) for who in "abc"
            }
            assert sum(used.values()) <= 6
            for one in jobs.values():
                waits = one.id not in running and one.submitted <= event.at and ran[one.id] < one.duration
                if waits:
                    assert used[one.department] + one.gpus > guarantees[one.department]
                    assert sum(used.values()) + one.gpus > 6
    possible = {one.id for one in jobs.values() if one.gpus <= 6}
    assert {one for one, time in ran.items() if time == jobs[one].duration} == possible
