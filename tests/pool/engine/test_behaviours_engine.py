"""Behaviours drawn from public bug reports that one decision or a row of them answers, each named by its id
(behaviours.json).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pool.engine.decide import decide
from pool.engine.model import Plan, Policy, Request, Running, Snapshot, Waiting
from quotas.engine.tree import QuotaNode, QuotaTree
from tests.pool.engine.builders import HOUR, NOW, ask, node, pool, quota, run
from tests.pool.engine.test_taking_back_properties import now_of, start

ONE, TWO, THREE = 2, 3, 4
BALANCING = Policy(rebalance=True)


def tree(running: list[Running], flavour: str, *rows: QuotaNode) -> tuple[QuotaNode, ...]:
    """Rows of one flavour with what runs of it charged."""
    booked = QuotaTree(rows)
    for one in running:
        if one.flavour == flavour:
            booked.add(one.department_id, one.charge_milli, interruptible=one.interruptible)
    return booked.snapshot()


def world(pending: list[Request], running: list[Running], total: int = 8, **given: int) -> Snapshot:
    """Nodes of eight A100 below one root; guarantees in cards by department (``one=4``)."""
    numbers = {"one": ONE, "two": TWO, "three": THREE}
    rows = [
        QuotaNode(1, guarantee=1000 * total),
        *(QuotaNode(number, 1, guarantee=1000 * given.get(name, 0)) for name, number in numbers.items()),
    ]
    nodes = [node(number, min(8, total)) for number in range(1, max(1, total // 8) + 1)]
    return pool(nodes, pending, running, quotas=quota(*tree(running, "A100", *rows)))


def plan(snapshot: Snapshot, policy: Policy = Policy()) -> Plan:  # noqa: B008 - immutable
    return decide(snapshot, policy, NOW)


def started(result: Plan) -> list[int]:
    return sorted(place.request_id for place in result.places)


def gone(result: Plan) -> list[int]:
    return sorted(evict.allocation_id for evict in result.evicts)


def why(result: Plan, request_id: int) -> Waiting:
    return next(one for one in result.waiting if one.request_id == request_id)


def cards_of(result: Plan) -> list[int]:
    return [take.gpu_id for place in result.places for member in place.members for take in member.takes]


def until_rest(snapshot: Snapshot, policy: Policy, turns: int = 20) -> tuple[Counter[int], dict[int, int]]:
    """Decide again and again; stops take no time, who was evicted asks again at once. How often each request was
    evicted, and what each department holds at rest."""
    asked = {request.id: request for request in snapshot.pending}
    for one in snapshot.running:
        asked[one.request_id] = ask(
            one.request_id,
            one.charge_milli // 1000,
            department_id=one.department_id,
            duration_ms=None,
            queued_at=0,
        )
    running = {one.allocation_id: one for one in snapshot.running}
    pending = {request.id: request for request in snapshot.pending}
    kept, evicted = (), Counter[int]()
    for turn in range(turns):
        result = decide(now_of(snapshot, pending, running, kept), policy, NOW + turn)
        for evict in result.evicts:
            left = running.pop(evict.allocation_id)
            evicted[left.request_id] += 1
            by = asked[evict.for_request_id].department_id
            again = asked[left.request_id]
            pending[again.id] = asked[again.id] = replace(again, displaced_by=(*again.displaced_by, by))
        start(result, pending, running, NOW + turn)
        kept = result.keeps
        if not result.evicts and not result.places:
            held: Counter[int] = Counter()
            for one in running.values():
                held[one.department_id] += one.charge_milli // 1000
            return evicted, dict(held)
    raise AssertionError(f"still changing: {evicted}")


def fraction(number: int, milli: int = 0, mib: int = 0, **changes: Any) -> Request:
    return ask(number, changes.pop("per_node", 1), shape="fraction", milli=milli, share_mib=mib, **changes)


class TestPlaces:
    def test_s128_two_departments_one_last_node_one_pass(self) -> None:
        pending = [ask(1, 8, department_id=ONE), ask(2, 8, department_id=TWO)]
        result = plan(world(pending, []))
        assert started(result) == [1]
        assert sorted(cards_of(result)) == list(range(100, 108))
        assert why(result, 2).code in ("no_node_fits", "waiting_for_release")
        both = plan(world(pending, [], total=16))
        assert (started(both), len(set(cards_of(both)))) == ([1, 2], 16)

    @pytest.mark.parametrize(
        ("asks", "fit"),
        [
            # S148: two that would each take 60 % of one card.
            ([fraction(1, 600), fraction(2, 600)], [1]),
            # S149: one card with 24 GiB left, three jobs of 12 GiB.
            ([fraction(1, 0, 16_384), *(fraction(n, 0, 12_288) for n in (2, 3, 4))], [1, 2, 3]),
            # P017: a half and two quarters are exactly one card, and nothing more goes on it.
            ([fraction(1, 500), fraction(2, 250), fraction(3, 250), fraction(4, 1)], [1, 2, 3]),
            # P018: three shares of 0.3 leave 0.1, not a rounding's rest.
            ([fraction(n, 300) for n in (1, 2, 3)] + [fraction(4, 101), fraction(5, 100)], [1, 2, 3, 5]),
        ],
        ids=["s148", "s149", "p017", "p018"],
    )
    def test_shares_of_one_card_never_exceed_it(self, asks: list[Request], fit: list[int]) -> None:
        result = plan(pool([node(1, 1)], asks))
        assert started(result) == fit
        spans = sorted(
            span
            for place in result.places
            for member in place.members
            for take in member.takes
            for span in take.spans
        )
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
        memory = [
            take.memory_mib for place in result.places for member in place.members for take in member.takes
        ]
        assert sum(memory) <= 40_960

    def test_s150_two_devices_of_60_percent_are_charged_1200_and_stay_within_the_guarantee(self) -> None:
        firm = fraction(1, 600, per_node=2, interruptible=False)
        refused = plan(world([firm], [], one=1))
        assert (refused.places, why(refused, 1).code) == ((), "quota_blocked")
        assert (why(refused, 1).figures["requested"], why(refused, 1).figures["limit"]) == (1200, 1000)
        assert plan(world([firm], [], one=2)).places[0].charge_milli == 1200
        assert plan(world([replace(firm, interruptible=True)], [], one=1)).places[0].charge_milli == 1200

    def test_s156_a_cap_lets_exactly_as_many_start_as_ended(self) -> None:
        capped = QuotaNode(ONE, 1, guarantee=2000, hard_cap=2000)
        root = QuotaNode(1, guarantee=8000)
        waiting = [ask(3, 1), ask(4, 1)]
        full = [run(1, 1, [0]), run(2, 1, [1])]
        before = pool([node(1)], waiting, full, quotas=quota(*tree(full, "A100", root, capped)))
        after = pool([node(1)], waiting, full[1:], quotas=quota(*tree(full[1:], "A100", root, capped)))
        assert (started(plan(before)), why(plan(before), 3).code) == ([], "quota_blocked")
        assert (started(plan(after)), why(plan(after), 4).code) == ([3], "quota_blocked")


class TestModels:
    def test_s138_what_is_borrowed_of_one_model_does_not_count_in_the_line_of_another(self) -> None:
        """One H100 is free; A (4 of 5, and far above its own on A100) and C (4 of 5) both ask within theirs."""
        nodes = [node(1, 8, "H100"), node(2, 1, "H100"), node(3), node(4)]
        running = [
            run(1, 1, range(4), flavour="H100", department=ONE),
            run(2, 1, range(4, 8), flavour="H100", department=TWO),
            run(3, 3, range(8), department=ONE),
        ]
        own = {flavour: [QuotaNode(1, guarantee=16_000)] for flavour in ("H100", "A100")}
        for department in (ONE, TWO):
            own["H100"].append(QuotaNode(department, 1, guarantee=5000))
            own["A100"].append(QuotaNode(department, 1, guarantee=0))
        quotas = {flavour: tree(running, flavour, *rows) for flavour, rows in own.items()}
        for first, second in ((ONE, TWO), (TWO, ONE)):
            pending = [ask(1, 1, "H100", department_id=first), ask(2, 1, "H100", department_id=second)]
            assert started(plan(pool(nodes, pending, running, quotas=quotas))) == [1]

    def test_s139_p015_strict_order_holds_per_model_and_names_who_blocks(self) -> None:
        nodes = [node(1, 8, "H100"), node(2)]
        running = [run(1, 1, range(2), hours=2, flavour="H100")]
        pending = [ask(1, 8, "H100"), ask(2, 8, "A100"), ask(3, 1, "H100", duration_ms=HOUR)]
        strict = plan(pool(nodes, pending, running), Policy(queueing="strict"))
        assert started(strict) == [2]
        assert (why(strict, 3).code, why(strict, 3).figures["requests"]) == ("behind", [1])
        assert started(plan(pool(nodes, pending, running))) == [2, 3]

    def test_p080_each_model_is_checked_alone_and_the_level_that_holds_is_named(self) -> None:
        """8 H100 and 16 A100 for the department; the tighter of the department's and its parent's cap is told."""
        nodes = [node(1, 8, "H100"), node(2, 8, "H100"), node(3), node(4)]
        quotas = {
            "H100": (QuotaNode(1, guarantee=16_000), QuotaNode(ONE, 1, guarantee=8000, hard_cap=8000)),
            "A100": (
                QuotaNode(1, guarantee=16_000, hard_cap=12_000),
                QuotaNode(ONE, 1, guarantee=8000, hard_cap=16_000),
            ),
        }
        pending = [ask(n, 8, flavour) for n, flavour in ((1, "H100"), (2, "A100"), (3, "H100"), (4, "A100"))]
        result = plan(pool(nodes, pending, quotas=quotas))
        assert started(result) == [1, 2]
        told = {number: why(result, number).figures for number in (3, 4)}
        assert (told[3]["level"], told[3]["limit"], told[3]["used"]) == (ONE, 8000, 8000)
        assert (told[4]["level"], told[4]["limit"], told[4]["used"]) == (1, 12_000, 8000)


class TestLine:
    def test_s140_what_waits_behind_the_head_is_kept_until_a_named_time_or_lent(self) -> None:
        """The head needs all of two nodes, one is free: a borrower uses it up to the head's start, no longer."""
        running = [run(1, 1, range(8), hours=2, department=TWO, interruptible=False)]
        head = ask(1, 8, nodes=2, department_id=ONE)
        short, endless = (
            ask(2, 8, department_id=TWO, duration_ms=2 * HOUR),
            ask(2, 8, department_id=TWO, duration_ms=None),
        )
        lent = plan(world([head, short], running, total=16, one=16))
        assert started(lent) == [2]
        kept = plan(world([head, endless], running, total=16, one=16))
        assert kept.places == ()
        assert (why(kept, 2).code, why(kept, 2).figures["reserved_from"]) == ("behind", NOW + 2 * HOUR)
        assert [(one.request_id, one.start_at) for one in kept.reserves][:1] == [(1, NOW + 2 * HOUR)]

    def test_s153_s154_a_gang_of_eight_nodes_is_not_starved_by_small_work(self) -> None:
        """Nodes come free at different times; the promise stands at the last real end, and whatever small work is
        there, it does not move."""
        nodes = [node(number) for number in range(1, 9)]
        running = [run(number, number, range(8), hours=number) for number in range(1, 9)]
        gang = ask(1, 8, nodes=8, duration_ms=4 * HOUR)
        alone = plan(pool(nodes, [gang], running)).reserves[0].start_at
        assert alone == NOW + 8 * HOUR
        free = running[1:]
        small = [ask(n, 4, duration_ms=hours * HOUR) for n, hours in ((2, 8), (3, 7), (4, 1))]
        result = plan(pool(nodes, [gang, *small], free))
        assert result.reserves[0].start_at == alone
        assert started(result) == [2, 3]
        late = plan(pool(nodes, [gang, replace(small[0], duration_ms=8 * HOUR + 1)], free))
        assert (late.places, why(late, 2).code, late.reserves[0].start_at) == ((), "behind", alone)

    def test_s155_a_head_that_can_never_start_is_told_and_stops_nobody(self) -> None:
        nodes = [node(1), node(2, blocked="lost"), node(3, blocked="cordoned")]
        pending = [ask(1, 8, nodes=3), ask(2, 8)]
        for policy in (Policy(), Policy(queueing="strict")):
            result = plan(pool(nodes, pending), policy)
            assert started(result) == [2]
            assert (why(result, 1).code, why(result, 1).estimate) == ("too_few_nodes", None)

    @pytest.mark.parametrize(
        ("start", "hours", "kept"),
        [
            (1, 3, False),
            (5, 3, False),
            (1, 9, False),
            (3, 1, False),
            (0, 2, True),
            (6, 2, True),
            (2, 4, False),
        ],
        ids=["starts-before", "ends-after", "contains", "inside", "touches-start", "touches-end", "same"],
    )
    def test_p054_two_windows_on_one_node_are_never_promised_the_same_time(
        self, start: int, hours: int, kept: bool
    ) -> None:
        """A window of four hours stands in two hours; half-open: who ends when it starts is in nobody's way."""
        first = ask(1, 8, start_at=NOW + 2 * HOUR, duration_ms=4 * HOUR)
        other = ask(2, 8, start_at=NOW + start * HOUR + 1, duration_ms=hours * HOUR)
        if start == 0:
            other = replace(other, duration_ms=hours * HOUR - 1)
        result = plan(pool([node(1)], [first, other]))
        assert [reserve.request_id for reserve in result.reserves] == ([1, 2] if kept else [1])
        assert (why(result, 1).figures["kept"], why(result, 2).figures["kept"]) == (True, kept)

    def test_p023_what_is_out_of_order_is_lost_to_all_by_their_shares(self) -> None:
        """Sixteen installed, eight healthy: fair shares divide what is healthy, two equal borrowers get four each."""
        nodes = [node(1), node(2, blocked="lost")]
        rows = (QuotaNode(1, guarantee=16_000), QuotaNode(ONE, 1), QuotaNode(TWO, 1))
        running = [run(n, 1, [n - 1], None, ONE if n < 7 else TWO, started_at=NOW - n) for n in range(1, 9)]
        pending = [ask(1, 2, department_id=TWO, duration_ms=None)]
        snapshot = pool(nodes, pending, running, quotas=quota(*tree(running, "A100", *rows)))
        result = plan(snapshot, BALANCING)
        assert gone(result) == [1, 2]
        figures = result.evicts[0].figures
        assert (figures["asking_share"], figures["giving_share"]) == (4000, 4000)


class TestTakingBack:
    def test_s133_after_the_put_back_every_victim_must_still_be_rightly_taken(self) -> None:
        """Six cards are asked; all own lower work gone, they lie within the guarantee of six. One own job would do
        beside the other department's four: with the second put back it is eight of six, and nobody goes."""
        running = [
            run(1, 1, range(2), None, ONE, priority=1),
            run(2, 1, range(2, 4), None, ONE, priority=1),
            run(3, 1, range(4, 8), None, TWO),
        ]
        more = ask(1, 6, department_id=ONE, priority=9)
        dropped = plan(world([more], running, one=6))
        assert (dropped.evicts, dropped.keeps, dropped.places) == ((), (), ())
        rightly = plan(world([more], running, one=8))
        assert len(gone(rightly)) == 2
        assert 3 in gone(rightly)

    @pytest.mark.parametrize(
        ("asked", "evicted", "held"),
        [(6, 0, {ONE: 8}), (5, 0, {ONE: 8}), (4, 2, {ONE: 4, TWO: 4}), (3, 2, {ONE: 4, TWO: 3})],
    )
    def test_s134_gangs_of_6_5_4_and_3_against_four_pairs(
        self, asked: int, evicted: int, held: dict[int, int]
    ) -> None:
        running = [run(n, 1, range(2 * n - 2, 2 * n), None, ONE, started_at=NOW - n) for n in range(1, 5)]
        snapshot = world([ask(1, asked, department_id=TWO, duration_ms=None)], running)
        counts, rest = until_rest(snapshot, BALANCING)
        assert (sum(counts.values()), rest) == (evicted, held)
        assert set(counts.values()) <= {1}
        assert until_rest(snapshot, Policy()) == (Counter(), {ONE: 8})

    def test_s135_siblings_of_equal_right_do_not_take_from_one_another(self) -> None:
        """Two children without a guarantee below a parent that owns four of eight; another borrows all."""
        rows = (
            QuotaNode(1, guarantee=8000),
            QuotaNode(9, 1, guarantee=4000),
            QuotaNode(ONE, 9, guarantee=0),
            QuotaNode(TWO, 9, guarantee=0),
            QuotaNode(THREE, 1, guarantee=0),
        )
        running = [run(n, 1, [n - 1], None, THREE, started_at=NOW - n) for n in range(1, 9)]
        pending = [ask(n, 1, department_id=ONE if n % 2 else TWO, duration_ms=None) for n in range(1, 9)]
        snapshot = pool([node(1)], pending, running, quotas=quota(*tree(running, "A100", *rows)))
        for policy, moved in ((Policy(), 4), (BALANCING, 6)):
            counts, rest = until_rest(snapshot, policy)
            assert {number for number in counts if number <= 8} == set()
            assert (sum(counts.values()), rest[ONE] + rest[TWO], rest[THREE]) == (moved, moved, 8 - moved)

    def test_s151_an_absurd_ask_takes_nothing_from_the_right_of_the_others(self) -> None:
        running = [run(n, 1, [n], None, TWO, started_at=NOW - n) for n in range(8)]
        absurd = ask(1, 2_000_000_000, nodes=1000, department_id=ONE)
        result = plan(world([absurd, ask(2, 1, department_id=ONE)], running, one=4))
        assert (len(result.evicts), result.evicts[0].for_request_id) == (1, 2)
        assert why(result, 1).code == "larger_than_any_node"
        # Between borrowers too: the demand that counts is at most what there is.
        balanced = plan(
            world([absurd, ask(2, 1, department_id=ONE), ask(3, 8, department_id=THREE)], running), BALANCING
        )
        assert [evict.for_request_id for evict in balanced.evicts] == [2]

    def test_s157_the_first_has_nobody_to_take_from_and_the_next_is_tried(self) -> None:
        nodes = [node(1), node(2, 2, "T4")]
        running = [
            run(1, 1, range(8), None, TWO),
            run(2, 2, range(2), None, TWO, flavour="T4", interruptible=False),
        ]
        rows = [QuotaNode(1, guarantee=8000), QuotaNode(ONE, 1, guarantee=4000), QuotaNode(TWO, 1)]
        quotas = {code: tree(running, code, *rows) for code in ("A100", "T4")}
        pending = [ask(1, 2, "T4"), ask(2, 2, "A100", nodes=2), ask(3, 2, "A100")]
        result = plan(pool(nodes, pending, running, quotas=quotas))
        assert [(evict.allocation_id, evict.for_request_id) for evict in result.evicts] == [(1, 3)]

    def test_s160_a_victim_too_big_is_skipped_and_the_search_goes_on(self) -> None:
        """The newest first: six cards of a department that owns four and holds seven are more than may be taken."""
        running = [
            run(1, 1, range(6), None, TWO, started_at=NOW),
            run(2, 1, [6], None, TWO, started_at=NOW - HOUR),
        ]
        running += [run(3, 1, [7], None, ONE)]
        assert gone(plan(world([ask(1, 1, department_id=ONE)], running, one=4, two=4))) == [2]

    def test_s166_two_borrowers_of_weight_zero_leave_one_another_alone(self) -> None:
        rows = (
            QuotaNode(1, guarantee=8000),
            QuotaNode(ONE, 1, guarantee=0, weight=0),
            QuotaNode(TWO, 1, guarantee=0, weight=0),
        )
        running = [run(n, 1, range(2 * n - 2, 2 * n), None, ONE) for n in range(1, 5)]
        for cards in (1, 4, 8):
            pending = [ask(1, cards, department_id=TWO, duration_ms=None)]
            snapshot = pool([node(1)], pending, running, quotas=quota(*tree(running, "A100", *rows)))
            assert until_rest(snapshot, BALANCING) == (Counter(), {ONE: 8})
