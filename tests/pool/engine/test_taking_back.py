"""Taking back: owners reclaim, importance displaces within a department, as little as is enough, kept for whom it
was freed, and never in circles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pool.engine.decide import decide
from pool.engine.model import (
    Kept,
    MinimumRun,
    Node,
    Plan,
    Policy,
    Request,
    Running,
    Snapshot,
)
from quotas.engine.tree import QuotaNode, QuotaTree
from tests.pool.engine.builders import HOUR, NOW, ask, node, pool, quota, run

OWNER, BORROWER, THIRD = 2, 3, 4


def world(
    pending: list[Request],
    running: list[Running],
    *nodes: Node,
    guarantees: dict[int, int] | None = None,
    **more: Any,
) -> Snapshot:
    """A pool of A100 nodes with departments 2 to 4 below department 1, and all that runs charged."""
    nodes = nodes or (node(1),)
    given = guarantees or {OWNER: 4, BORROWER: 4, THIRD: 0}
    total = sum(len(one.gpus) for one in nodes)
    tree = QuotaTree(
        [
            QuotaNode(1, guarantee=1000 * total),
            *(QuotaNode(number, 1, guarantee=1000 * cards) for number, cards in given.items()),
        ]
    )
    for one in running:
        tree.add(one.department_id, one.charge_milli, interruptible=one.interruptible)
    return pool(nodes, pending, running, quotas=quota(*tree.snapshot()), **more)


def plan(snapshot: Snapshot, **policy: Any) -> Plan:
    return decide(snapshot, Policy(**policy), NOW)


def gone(result: Plan) -> list[int]:
    return [evict.allocation_id for evict in result.evicts]


def held(number: int, cards: range, department: int = BORROWER, node_id: int = 1, **more: Any) -> Running:
    return run(number, node_id, cards, hours=None, department=department, **more)


class TestReclaim:
    def test_an_owner_takes_back_as_little_as_is_enough_the_newest_first(self) -> None:
        running = [held(n, range(n - 1, n), started_at=NOW - 10 * HOUR + n) for n in range(1, 9)]
        result = plan(world([ask(1, 2, department_id=OWNER)], running))
        assert gone(result) == [7, 8]
        assert {evict.cause for evict in result.evicts} == {"reclaim"}
        assert result.evicts[0].figures == {
            "flavour": "A100", "requested": 2000, "freed": 1000, "asking": OWNER, "asking_used": 0,
            "asking_guarantee": 4000, "asking_share": 2000, "giving": BORROWER, "giving_used": 8000,
            "giving_guarantee": 4000, "giving_share": 6000,
        }  # fmt: skip
        assert [kept.request_id for kept in result.keeps] == [1]
        assert {take.gpu_id for take in result.keeps[0].members[0].takes} == {106, 107}
        assert result.keeps[0].until == NOW + Policy().keep_for_preemptor_ms
        assert result.places == ()
        assert (result.waiting[0].code, result.waiting[0].figures["evicts"]) == ("making_room", 2)

    def test_nobody_above_its_guarantee_nobody_goes(self) -> None:
        running = [held(1, range(4)), held(2, range(4, 8), department=THIRD)]
        given = {OWNER: 4, BORROWER: 4, THIRD: 4}
        assert plan(world([ask(1, 2, department_id=OWNER)], running, guarantees=given)).evicts == ()

    def test_beyond_its_guarantee_it_takes_nothing_back_unless_borrowers_are_balanced(self) -> None:
        running = [held(1, range(4), department=OWNER), held(2, range(4, 8), department=THIRD)]
        given = {OWNER: 4, BORROWER: 0, THIRD: 0}
        snapshot = world([ask(1, 2, department_id=BORROWER)], running, guarantees=given)
        assert plan(snapshot).evicts == ()
        balanced = plan(snapshot, rebalance=True)
        assert (gone(balanced), balanced.evicts[0].cause) == ([2], "rebalance")

    def test_work_that_may_not_be_interrupted_stays_and_gangs_go_whole(self) -> None:
        gang = replace(
            held(2, range(4)),
            members=(*held(2, range(4)).members, *held(2, range(4), node_id=2).members),
            charge_milli=8000,
        )
        running = [
            held(1, range(4, 8), interruptible=False, started_at=NOW),
            gang,
            held(3, range(4, 8), THIRD, 2),
        ]
        given = {OWNER: 4, BORROWER: 2, THIRD: 10}
        result = plan(world([ask(1, 4, department_id=OWNER)], running, node(1), node(2), guarantees=given))
        assert (gone(result), result.evicts[0].members) == ([2], ())

    def test_members_that_an_elastic_gang_can_do_without_go_alone(self) -> None:
        members = tuple(
            replace(held(1, range(8), node_id=number).members[0], number=number - 1) for number in (1, 2, 3)
        )
        gang = replace(held(1, range(8)), members=members, charge_milli=24000, min_nodes=1)
        nodes = (node(1), node(2), node(3))
        given = {OWNER: 8, BORROWER: 8, THIRD: 0}
        result = plan(world([ask(1, 8, department_id=OWNER)], [gang], *nodes, guarantees=given))
        assert [(evict.allocation_id, evict.members) for evict in result.evicts] == [(1, (2,))]

    def test_the_branch_above_its_share_by_most_gives_and_one_gang_rather_than_many_jobs(self) -> None:
        small = [held(n, range(n, n + 1), THIRD, started_at=NOW - n) for n in range(5)]
        running = [*small, held(9, range(5, 8), BORROWER, started_at=NOW - HOUR)]
        given = {OWNER: 4, BORROWER: 0, THIRD: 0}
        assert gone(plan(world([ask(1, 1, department_id=OWNER)], running, guarantees=given))) == [0]
        assert gone(plan(world([ask(1, 3, department_id=OWNER)], running, guarantees=given))) == [9]

    def test_the_minimum_run_time_protects_from_the_last_start(self) -> None:
        running = [held(1, range(8), started_at=NOW - 5 * 60_000)]
        snapshot = world([ask(1, 2, department_id=OWNER)], running)
        assert gone(plan(snapshot, min_run_reclaim_ms=300_000)) == [1]
        assert gone(plan(snapshot, min_run_reclaim_ms=300_001)) == []
        own = replace(snapshot, minimum_run={BORROWER: MinimumRun(reclaim_ms=600_000)})
        assert gone(plan(own)) == []
        assert gone(plan(replace(snapshot, running=(replace(running[0], evictable_after=NOW + 1),)))) == []

    def test_what_is_ending_already_is_counted_and_nobody_else_goes(self) -> None:
        running = [held(1, range(2), ending=True), held(2, range(2, 8))]
        result = plan(world([ask(1, 2, department_id=OWNER)], running))
        assert (result.evicts, result.waiting[0].code) == ((), "making_room")

    def test_a_spared_department_keeps_its_work_and_the_plan_says_what_it_would_have_lost(self) -> None:
        running = [held(1, range(4), spared=True, started_at=NOW), held(2, range(4, 8), THIRD)]
        given = {OWNER: 2, BORROWER: 0, THIRD: 2}
        result = plan(world([ask(1, 2, department_id=OWNER)], running, guarantees=given))
        assert gone(result) == [2]
        assert [evict.allocation_id for evict in result.spared] == [1]

    def test_what_this_plan_would_start_on_borrowed_cards_gives_way_before_anything_that_runs(self) -> None:
        running = [held(n, range(n - 1, n), started_at=NOW - n) for n in range(1, 7)]
        pending = [ask(1, 4, department_id=OWNER), ask(2, 2, department_id=THIRD)]
        result = plan(world(pending, running))
        assert gone(result) == [1, 2]
        assert result.places == ()
        assert [one.request_id for one in result.waiting] == [1, 2]
        assert {take.gpu_id for take in result.keeps[0].members[0].takes} >= {106, 107}

    def test_displaced_by_a_department_it_takes_back_only_from_well_above_its_guarantee(self) -> None:
        running = [held(1, range(8))]
        request = ask(1, 1, department_id=OWNER, displaced_by=(BORROWER,))
        close = world([request], running, guarantees={OWNER: 1, BORROWER: 7, THIRD: 0})
        assert gone(plan(close, displace_margin_permille=150)) == []
        assert gone(plan(close, displace_margin_permille=100)) == [1]
        assert gone(plan(world([replace(request, evicts_after=NOW + 1)], running))) == []

    def test_a_branch_falls_below_its_guarantee_only_where_no_other_set_works(self) -> None:
        running = [held(1, range(5), started_at=NOW), held(2, range(5, 8), THIRD, started_at=NOW - HOUR)]
        given = {OWNER: 2, BORROWER: 4, THIRD: 1}
        result = plan(world([ask(1, 2, department_id=OWNER)], running, guarantees=given))
        assert gone(result) == [2]
        assert gone(
            plan(world([ask(1, 2, department_id=OWNER)], running[:1], node(1, 5), guarantees=given))
        ) == [1]


class TestKept:
    def test_kept_places_are_for_their_request_alone_and_it_starts_when_they_are_free(self) -> None:
        first = plan(world([ask(1, 2, department_id=OWNER)], [held(1, range(8))]))
        ending = [held(1, range(8), ending=True)]
        pending = [ask(1, 2, department_id=OWNER), ask(2, 1, department_id=THIRD)]
        waits = plan(world(pending, ending, kept=first.keeps))
        assert (waits.places, waits.evicts) == ((), ())
        assert waits.waiting[0].figures == {"flavour": "A100", "evicts": 0, "until": first.keeps[0].until}
        starts = plan(world(pending, [], kept=first.keeps))
        assert {place.request_id: place.members for place in starts.places}[1] == first.keeps[0].members
        taken = {take.gpu_id for place in starts.places for member in place.members for take in member.takes}
        assert len(taken) == 3

    def test_others_keep_off_while_they_are_kept_and_not_after(self) -> None:
        member = held(1, range(8)).members
        kept = Kept(1, member, NOW + 1)
        absent = world(
            [
                ask(1, 8, department_id=OWNER, start_at=NOW + HOUR),
                ask(2, 1, department_id=THIRD, duration_ms=HOUR // 2),
            ],
            [],
        )
        assert plan(replace(absent, kept=(kept,))).places == ()
        assert [p.request_id for p in plan(replace(absent, kept=(replace(kept, until=NOW),))).places] == [2]

    @pytest.mark.parametrize(
        ("cards", "asked_ms_ago", "running_ms", "patient"),
        [
            (1, 1, 60_000, True),
            (1, 60_000, 60_000, False),  # it has waited long enough
            (1, 1, 60_001, False),  # less than one end is expected in a minute
            (2, 1, 60_000, False),  # one card is not enough
        ],
    )
    def test_an_owner_is_patient_for_one_card_that_may_be_expected(
        self, cards: int, asked_ms_ago: int, running_ms: int, patient: bool
    ) -> None:
        lent = [held(1, range(8), started_at=NOW - running_ms)]
        asked = [ask(1, cards, department_id=OWNER, queued_at=NOW - asked_ms_ago)]
        assert gone(plan(world(asked, lent), reclaim_patience_ms=60_000)) == ([] if patient else [1])

    def test_places_that_are_not_as_many_as_it_takes_now_are_let_go(self) -> None:
        """Kept for two cards; the request asks for four of them, or for two nodes, meanwhile."""
        kept = Kept(1, held(1, range(2)).members, NOW + HOUR)
        for changed in (ask(1, 4, department_id=OWNER), ask(1, 2, department_id=OWNER, nodes=2)):
            both = world([changed], [], node(1), node(2), guarantees={OWNER: 8}, kept=(kept,))
            (place,) = plan(both).places
            assert sum(len(member.takes) for member in place.members) == changed.per_node * changed.nodes
            assert len(place.members) == changed.nodes

    def test_borrowers_are_gone_when_a_reserved_window_begins(self) -> None:
        lent = [held(1, range(8))]
        later = plan(world([ask(1, 4, department_id=OWNER, start_at=NOW + HOUR)], lent))
        assert (later.evicts, later.keeps) == ((), ())
        assert later.waiting[0].figures == {"start_at": NOW + HOUR, "kept": False}
        soon = [ask(1, 4, department_id=OWNER, start_at=NOW + HOUR // 6)]
        before = plan(world(soon, lent))
        assert gone(before) == [1]
        assert [kept.request_id for kept in before.keeps] == [1]
        free = world(soon, [], kept=before.keeps)
        waits = plan(world(soon, [held(1, range(8), ending=True)], kept=before.keeps))
        assert (waits.places, waits.evicts) == ((), ())
        assert plan(free).places == ()
        (place,) = decide(free, Policy(), NOW + HOUR // 6).places
        assert place.members == before.keeps[0].members

    def test_a_window_that_borrowers_leave_by_themselves_takes_nothing_back(self) -> None:
        window = ask(1, 8, department_id=OWNER, start_at=NOW + HOUR // 6)
        ends = [replace(one, ends_at=NOW + HOUR // 12) for one in [held(1, range(8))]]
        result = plan(world([window], ends))
        assert (result.evicts, [one.start_at for one in result.reserves]) == ((), [NOW + HOUR // 6])


class TestPreempt:
    def test_strictly_more_important_work_of_the_same_department(self) -> None:
        running = [
            held(1, range(4), OWNER, priority=50, started_at=NOW - 2),
            held(2, range(4, 8), OWNER, priority=50, started_at=NOW - 1),
        ]
        more = ask(1, 2, department_id=OWNER, priority=60)
        result = plan(world([more], running))
        assert (gone(result), result.evicts[0].cause) == ([2], "preempt")
        assert result.evicts[0].figures["victim_priority"] == 50
        assert gone(plan(world([replace(more, priority=50)], running))) == []
        assert gone(
            plan(world([replace(more, priority=50, queued_at=NOW - 2)], running), preempt_equal=True)
        ) == [2]
        assert gone(plan(world([more], running), preempt=False)) == []

    def test_never_across_departments_and_the_minimum_run_time_protects(self) -> None:
        running = [held(1, range(8), BORROWER, priority=1, started_at=NOW)]
        given = {OWNER: 0, BORROWER: 8, THIRD: 0}
        important = ask(1, 2, department_id=OWNER, priority=99)
        assert gone(plan(world([important], running, guarantees=given))) == []
        mine = [held(1, range(8), OWNER, priority=1, started_at=NOW)]
        assert gone(plan(world([important], mine), min_run_preempt_ms=1)) == []

    def test_claims_and_own_lower_work_together(self) -> None:
        running = [held(1, range(6), OWNER, priority=1), held(2, range(6, 8), THIRD)]
        given = {OWNER: 8, BORROWER: 0, THIRD: 0}
        result = plan(world([ask(1, 8, department_id=OWNER, priority=9)], running, guarantees=given))
        assert gone(result) == [1, 2]


class TestConsolidate:
    def test_movable_work_makes_room_only_where_asked_for(self) -> None:
        def movable(number: int, node_id: int) -> Running:
            asks = ask(10_000 + number, 1, duration_ms=None)
            return held(number, range(1), OWNER, node_id, movable=True, asks=asks, started_at=number)

        running = [movable(1, 1), movable(2, 2)]
        snapshot = world([ask(1, 2, department_id=OWNER)], running, node(1, 2), node(2, 2))
        assert plan(snapshot).moves == ()
        result = plan(snapshot, consolidate=True)
        assert [(move.allocation_id, move.members[0].node_id) for move in result.moves] == [(2, 1)]
        assert {kept.request_id: kept.members[0].node_id for kept in result.keeps} == {1: 2, 10_002: 1}
        assert result.evicts == ()


class TestElastic:
    def test_it_starts_with_as_many_as_there_are_but_at_least_its_minimum(self) -> None:
        nodes = [node(1), node(2), node(3)]
        busy = [run(1, 1, range(1))]
        gang = ask(1, 8, nodes=3, min_nodes=2)
        result = decide(pool(nodes, [gang], busy), Policy(), NOW)
        assert (len(result.places[0].members), result.places[0].charge_milli) == (2, 16000)
        assert decide(pool(nodes, [replace(gang, min_nodes=3)], busy), Policy(), NOW).places == ()

    def test_quota_makes_it_smaller_too(self) -> None:
        given = quota(QuotaNode(1, guarantee=24000), QuotaNode(2, 1, guarantee=0, hard_cap=17000))
        result = decide(
            pool([node(1), node(2), node(3)], [ask(1, 8, nodes=3, min_nodes=1)], quotas=given), Policy(), NOW
        )
        assert result.places[0].charge_milli == 16000


class TestReasons:
    def test_a_gang_is_told_how_many_nodes_fit_what_it_may_use_and_when_the_next_comes_free(self) -> None:
        running = [
            run(1, 1, range(3), hours=2, department=THIRD),
            run(2, 2, range(5), hours=5, department=THIRD),
        ]
        pending = [ask(1, 4, nodes=3, department_id=OWNER, deadline_at=NOW + HOUR, duration_ms=2 * HOUR)]
        given = {OWNER: 12, BORROWER: 4, THIRD: 8}
        waiting = plan(world(pending, running, node(1), node(2), node(3), guarantees=given)).waiting[0]
        assert waiting.code == "no_node_fits"
        assert {key: waiting.figures[key] for key in (
            "need_nodes", "nodes_that_fit", "nodes_missing", "missing", "may_use_milli", "next_release_at",
            "deadline_met",
        )} == {
            "need_nodes": 3, "nodes_that_fit": 2, "nodes_missing": 1, "missing": 0, "may_use_milli": 16000,
            "next_release_at": NOW + 2 * HOUR, "deadline_met": False,
        }  # fmt: skip

    def test_maintenance_to_come_holds_a_node_whole(self) -> None:
        closing = node(1, closed=((NOW + 2 * HOUR, NOW + 3 * HOUR),))
        result = decide(
            pool([closing], [ask(1, 1, duration_ms=3 * HOUR), ask(2, 1, duration_ms=HOUR)]), Policy(), NOW
        )
        assert [place.request_id for place in result.places] == [2]
        assert (result.waiting[0].code, result.waiting[0].figures["closed_from"]) == (
            "closed_soon",
            NOW + 2 * HOUR,
        )
        assert result.waiting[0].reserved is not None
        assert result.waiting[0].reserved.start_at == NOW + 3 * HOUR


class TestOnly:
    def test_a_new_request_is_judged_alone_behind_the_promises_of_the_others(self) -> None:
        running = [run(1, 1, range(6), hours=2, department=THIRD)]
        first = ask(1, 8, department_id=OWNER)
        whole = plan(world([first], running, guarantees={OWNER: 0, BORROWER: 0, THIRD: 8}))
        short, long = ask(2, 1, duration_ms=HOUR), ask(3, 1, duration_ms=9 * HOUR)
        snapshot = replace(
            world([first, short, long], running, guarantees={OWNER: 0, BORROWER: 0, THIRD: 8}),
            promised=whole.reserves,
        )
        quick = decide(snapshot, Policy(), NOW, only=frozenset({2, 3}))
        assert [place.request_id for place in quick.places] == [2]
        assert [(one.request_id, one.code) for one in quick.waiting] == [(3, "behind")]
        assert [(r.request_id, r.start_at) for r in quick.reserves] == [(3, NOW + 6 * HOUR)]


@pytest.mark.parametrize(
    "poison",
    [
        ask(666, 10**9, department_id=OWNER, priority=10**9),
        ask(666, 8, department_id=OWNER, nodes=10**6, min_nodes=1, priority=10**9),
        ask(666, 1, "☃" * 99, department_id=OWNER, priority=10**9),
        ask(666, 1, department_id=OWNER, shape="fraction", milli=1000, share_mib=10**12, priority=10**9),
        ask(666, 1, department_id=OWNER, cpu_milli=10**15, priority=10**9),
        ask(
            666, 8, department_id=OWNER, nodes=2, domain_required=99, fabric="carrier pigeon", priority=10**9
        ),
        ask(666, 0, department_id=OWNER, priority=10**9),
        ask(666, 1, department_id=10**9, priority=10**9),
        ask(666, 1, department_id=OWNER, duration_ms=0, deadline_at=-1, priority=10**9),
    ],
    ids=["cards", "nodes", "model", "memory", "cpu", "place", "nothing", "department", "time"],
)
def test_a_poisoned_request_stalls_nobody(poison: Request) -> None:
    running = [held(n, range(n, n + 1), started_at=NOW - n) for n in range(8)]
    result = plan(world([ask(1, 2, department_id=OWNER), poison], running))
    told = [one.request_id for one in (*result.places, *result.waiting)]
    assert sorted(told) == [1, 666]
    assert [kept.request_id for kept in result.keeps if kept.request_id == 1] == [1]
