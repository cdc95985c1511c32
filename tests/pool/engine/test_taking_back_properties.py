"""What holds for every pool when work is taken back: nothing twice, nobody without cause, no more than needed, the
same for any order of the snapshot, and an end to it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pool.engine.decide import decide
from pool.engine.model import Node, Plan, Policy, Request, Running, Snapshot
from pool.engine.world import World
from quotas.engine.tree import QuotaNode, QuotaTree
from tests.pool.engine.builders import HOUR, NOW, ask, node, pool, quota
from tests.pool.engine.test_invariants import used_spans

DEPARTMENTS = (2, 3, 4, 5)
BALANCING = Policy(rebalance=True)


@st.composite
def contested(draw: st.DrawFn) -> Snapshot:
    """A pool in which much runs on borrowed cards, and requests of owners and others wait."""
    nodes = [node(number, draw(st.integers(2, 8))) for number in range(1, draw(st.integers(1, 3)) + 1)]
    total = sum(len(one.gpus) for one in nodes)
    rows = [QuotaNode(1, guarantee=1000 * total)]
    left = total
    for department in DEPARTMENTS:
        cards = draw(st.integers(0, left))
        left -= cards
        cap = draw(st.sampled_from([None, None, None, 6000]))
        rows.append(
            QuotaNode(department, 1, guarantee=1000 * cards, hard_cap=cap, weight=draw(st.integers(0, 2)))
        )
    started = started_on(nodes, draw)
    tree = QuotaTree(rows)
    for one in started:
        tree.add(one.department_id, one.charge_milli, interruptible=one.interruptible)
    pending = [
        ask(
            number, draw(st.integers(1, 8)), department_id=draw(st.sampled_from(DEPARTMENTS)),
            priority=draw(st.integers(1, 2)), queued_at=draw(st.integers(0, 9)), duration_ms=None,
            nodes=draw(st.sampled_from([1, 1, 1, 2])), interruptible=draw(st.booleans()),
        )
        for number in range(1, draw(st.integers(1, 8)) + 1)
    ]  # fmt: skip
    return pool(nodes, pending, started, quotas=quota(*tree.snapshot()))


def started_on(nodes: list[Node], draw: st.DrawFn) -> list[Running]:
    found: list[Running] = []
    for one in nodes:
        first = 0
        while first < len(one.gpus):
            count = draw(st.integers(1, 4))
            cards = one.gpus[first : first + count]
            if draw(st.integers(0, 4)):
                number = len(found) + 1
                request = ask(1000 + number, len(cards), duration_ms=None)
                plan = decide(pool([replace(one, gpus=cards)], [request]), Policy(), NOW)
                found.append(
                    Running(
                        number, request.id, draw(st.sampled_from(DEPARTMENTS)), "A100", 1000 * len(cards),
                        plan.places[0].members, interruptible=draw(st.integers(0, 4)) > 0,
                        priority=draw(st.integers(1, 2)), started_at=NOW - draw(st.integers(1, 9)) * HOUR,
                        spared=draw(st.integers(0, 5)) == 0, ending=draw(st.integers(0, 7)) == 0,
                    )
                )  # fmt: skip
            first += count
    return found


@settings(max_examples=60, deadline=None)
@given(contested(), st.sampled_from([Policy(), BALANCING]))
def test_nothing_is_held_twice_and_every_victim_has_one_cause(snapshot: Snapshot, policy: Policy) -> None:
    plan = decide(snapshot, policy, NOW)
    running = {one.allocation_id: one for one in snapshot.running}
    assert max(Counter(evict.allocation_id for evict in plan.evicts).values(), default=1) == 1
    for evict in plan.evicts:
        victim = running[evict.allocation_id]
        assert (victim.interruptible, victim.spared, victim.ending) == (True, False, False)
    assert {evict.for_request_id for evict in plan.evicts} <= {kept.request_id for kept in plan.keeps}
    assert all(running[evict.allocation_id].spared for evict in plan.spared)
    gone = {evict.allocation_id for evict in plan.evicts}
    stays = [
        m for one in snapshot.running if one.allocation_id not in gone and not one.ending for m in one.members
    ]
    new = [m for place in plan.places for m in place.members] + [
        m for kept in plan.keeps for m in kept.members
    ]
    used_spans(stays + new)
    told = [place.request_id for place in plan.places] + [one.request_id for one in plan.waiting]
    assert sorted(told) == sorted(request.id for request in snapshot.pending)


@settings(max_examples=60, deadline=None)
@given(contested())
def test_owners_stay_within_their_guarantee_and_only_those_above_theirs_give(snapshot: Snapshot) -> None:
    plan = decide(snapshot, Policy(), NOW)
    running = {one.allocation_id: one for one in snapshot.running}
    asked = {request.id: request for request in snapshot.pending}
    for evict in plan.evicts:
        victim, request, sums = running[evict.allocation_id], asked[evict.for_request_id], evict.figures
        if victim.department_id == request.department_id:
            assert evict.cause == "preempt"
            assert victim.priority < request.priority
            assert (sums["victim_priority"], sums["priority"]) == (victim.priority, request.priority)
        else:
            # Who displaces lower work of its own as well claims for when that is gone; the sums are as before it.
            if evict.cause == "reclaim":
                assert sums["asking_used"] + sums["requested"] <= sums["asking_guarantee"]
            assert sums["giving_used"] > sums["giving_guarantee"]
            assert (sums["asking"], sums["giving"]) == (request.department_id, victim.department_id)


@settings(max_examples=60, deadline=None)
@given(contested())
def test_no_victim_is_spare_and_quotas_hold_once_they_are_gone(snapshot: Snapshot) -> None:
    """With one victim put back, a request that is alone does not fit any more; with all gone, all that was kept for
    whomever does. (Among several, what one leaves over may be enough for another.)"""
    for one in (snapshot, *(replace(snapshot, pending=(request,)) for request in snapshot.pending)):
        check_need_of_victims(one, alone=one is not snapshot)


def check_need_of_victims(snapshot: Snapshot, *, alone: bool) -> None:
    plan = decide(snapshot, Policy(), NOW)
    asked = {request.id: request for request in snapshot.pending}
    for spare in (None, *(plan.evicts if alone else ())):
        world = World(snapshot)
        for one in snapshot.running:
            evicted = any(evict.allocation_id == one.allocation_id for evict in plan.evicts)
            if one.ending or (evicted and (spare is None or one.allocation_id != spare.allocation_id)):
                world.release(one)
        for place in plan.places:
            request = asked[place.request_id]
            need = world.need(request, "A100")
            assert need is not None
            world.take(request, need, place.members)
        for kept in plan.keeps:
            request = asked[kept.request_id]
            need = world.need(request, "A100")
            assert need is not None
            if spare is None:
                assert world.fits_quota(request, need)
                world.take(request, need, kept.members)
            elif kept.request_id != spare.for_request_id:
                world.take(request, need, kept.members)
        if spare is not None:
            request = asked[spare.for_request_id]
            need = world.need(request, "A100")
            assert need is not None
            view = world.state.view(None)
            assert not world.fits_quota(request, need) or world.find(request, need, view) is None


@settings(max_examples=30, deadline=None)
@given(contested(), st.randoms(use_true_random=False), st.sampled_from([Policy(), BALANCING]))
def test_the_order_of_the_snapshot_does_not_matter(
    snapshot: Snapshot, rng: random.Random, policy: Policy
) -> None:
    def mixed(rows: tuple) -> tuple:
        return tuple(rng.sample(rows, len(rows)))

    other = replace(
        snapshot,
        nodes=mixed(snapshot.nodes),
        running=mixed(snapshot.running),
        pending=mixed(snapshot.pending),
        quotas={code: mixed(rows) for code, rows in snapshot.quotas.items()},
    )
    assert decide(other, policy, NOW) == decide(snapshot, policy, NOW)


@settings(max_examples=30, deadline=None)
@given(contested(), st.sampled_from([Policy(), BALANCING]))
def test_cycle_after_cycle_it_comes_to_rest(snapshot: Snapshot, policy: Policy) -> None:
    """Stops take no time, who was evicted asks again at once, nothing finishes: after a while nothing changes."""
    asked = {request.id: request for request in snapshot.pending}
    for one in snapshot.running:
        cards = sum(len(member.takes) for member in one.members)
        asked[one.request_id] = ask(
            one.request_id, cards // len(one.members), department_id=one.department_id, nodes=len(one.members),
            priority=one.priority, interruptible=one.interruptible, duration_ms=None, queued_at=5,
        )  # fmt: skip
    running = {one.allocation_id: replace(one, ending=False) for one in snapshot.running}
    pending = {request.id: request for request in snapshot.pending}
    kept, evictions, now = (), Counter[int](), NOW
    for turn in range(60):
        plan = decide(now_of(snapshot, pending, running, kept), policy, now + turn)
        for evict in plan.evicts:
            gone = running.pop(evict.allocation_id)
            evictions[gone.request_id] += 1
            by = asked[evict.for_request_id].department_id
            asked[gone.request_id] = replace(
                asked[gone.request_id], displaced_by=(*asked[gone.request_id].displaced_by, by)
            )
            pending[gone.request_id] = asked[gone.request_id]
        start(plan, pending, running, now + turn)
        kept = plan.keeps
        if not plan.evicts and not plan.places:
            assert evictions.most_common(1) == [] or evictions.most_common(1)[0][1] <= 3
            return
    raise AssertionError(f"still changing: {evictions}")


def start(plan: Plan, pending: dict[int, Request], running: dict[int, Running], now: int) -> None:
    for place in plan.places:
        request = pending.pop(place.request_id)
        number = max(running, default=0) + 1000
        running[number] = Running(
            number, request.id, request.department_id, place.flavour, place.charge_milli, place.members,
            request.interruptible, request.priority, started_at=now,
        )  # fmt: skip


def now_of(
    snapshot: Snapshot, pending: dict[int, Request], running: dict[int, Running], kept: tuple
) -> Snapshot:
    rows = [replace(row, charged=0, total=0, total_noninterruptible=0) for row in snapshot.quotas["A100"]]
    tree = QuotaTree(rows)
    for one in running.values():
        tree.add(one.department_id, one.charge_milli, interruptible=one.interruptible)
    return replace(
        snapshot, pending=tuple(pending.values()), running=tuple(running.values()), kept=kept,
        quotas=quota(*tree.snapshot()),
    )  # fmt: skip
