"""What makes decisions quick changes none of them: judging requests of one sort together, and keeping the world of
the last decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption

from pool.engine import decide as module
from pool.engine import preempt, reclaim
from pool.engine.allocate import Allocate
from pool.engine.decide import decide
from pool.engine.mix import learn
from pool.engine.model import Plan, Policy, Running, Snapshot
from pool.engine.round import Round
from pool.engine.victims import Candidate, Found, Search
from pool.engine.whatif import place_check
from pool.engine.world import World
from quotas.engine.tree import QuotaNode, QuotaTree
from tests.pool.engine.builders import FLAVOURS, HOUR, NOW, ask, node, pool, quota, run
from tests.pool.engine.test_invariants import snapshots
from tests.pool.engine.test_taking_back_properties import contested

FACTS = {facts.code: facts for facts in FLAVOURS}
BALANCING = Policy(rebalance=True)


class Forgetful(dict[Any, Any]):
    """A memo that keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class OneByOne(Allocate):
    """The walk with every request judged by itself."""

    def __init__(self, round_: Round) -> None:
        super().__init__(round_)
        self._stuck, self._hopeless, self._room_seen, self._only_behind = (
            Forgetful(), Forgetful(), Forgetful(), Forgetful(),
        )  # fmt: skip


def crowd(snapshot: Snapshot) -> Snapshot:
    """Each request four times over, so that there are sorts with several."""
    many = [
        replace(request, id=100 * request.id + copy, queued_at=request.queued_at + copy % 2)
        for request in snapshot.pending
        for copy in range(4)
    ]
    return replace(snapshot, pending=tuple(many))


def told(plan: Plan) -> list[tuple[Any, ...]]:
    """All of a plan but the reasons: those of a sort are what its first was told, of the flavour that it was judged
    on; judged by itself, one in a strict queue waits for that first one."""
    waiting = [
        (one.request_id, one.position, one.of, one.ahead, one.estimate, one.reserved) for one in plan.waiting
    ]
    return [plan.ops, plan.spared, *waiting]


@settings(max_examples=40, deadline=None)
@given(snapshots() | contested(), st.sampled_from([Policy(), BALANCING, Policy(queueing="strict")]))
def test_requests_of_one_sort_are_judged_together_as_they_would_be_one_by_one(
    snapshot: Snapshot, policy: Policy
) -> None:
    together = decide(crowd(snapshot), policy, NOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Allocate", OneByOne)
        one_by_one = decide(crowd(snapshot), policy, NOW)
    assert told(together) == told(one_by_one)


class Thorough(Search):
    """A search that looks for a place whatever the quota says, and asks for victims before it sees that none is
    needed."""

    def _at_once(self) -> Found | None:
        return None

    def _quota_fits(self, victims: Sequence[Candidate]) -> bool:
        return True


@settings(max_examples=60, deadline=None)
@given(snapshots() | contested(), st.sampled_from([Policy(), BALANCING]), st.data())
def test_searches_that_know_early_find_the_same_victims(
    snapshot: Snapshot, policy: Policy, data: st.DataObject
) -> None:
    ending = tuple(
        replace(one, ending=True) if not data.draw(st.integers(0, 2)) else one for one in snapshot.running
    )
    snapshot = replace(snapshot, running=ending)
    early = decide(snapshot, policy, NOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reclaim, "Search", Thorough)
        patch.setattr(preempt, "Search", Thorough)
        assert decide(snapshot, policy, NOW) == early


def learnt(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, mix=learn(snapshot.pending, snapshot.running, FACTS))


def after(snapshot: Snapshot, plan: Plan, draw: Callable[[Any], Any]) -> Snapshot:
    """What the pool may look like next: some of the plan runs, some work ended or changed, the line is another."""
    asked = {request.id: request for request in snapshot.pending}
    number = max((one.allocation_id for one in snapshot.running), default=0)
    running = [one for one in snapshot.running if draw(st.integers(0, 4))]
    running = [
        one if draw(st.integers(0, 5)) else replace(one, ending=True, priority=draw(st.integers(0, 2)))
        for one in running
    ]
    placed = set()
    for place in plan.places:
        if place.flavour is None or not draw(st.integers(0, 3)):
            continue
        number, request = number + 1, asked[place.request_id]
        placed.add(request.id)
        running.append(
            Running(
                number, request.id, request.department_id, place.flavour, place.charge_milli, place.members,
                interruptible=request.interruptible, priority=request.priority, started_at=NOW,
                ends_at=place.ends_at,
            )
        )  # fmt: skip
    pending = [one for one in snapshot.pending if one.id not in placed and draw(st.integers(0, 5))]
    trees = {code: QuotaTree(nodes) for code, nodes in snapshot.quotas.items()}
    gone = {one.allocation_id: one for one in snapshot.running}
    for one in running:
        if gone.pop(one.allocation_id, None) is None:
            _book(trees, one, sign=1)
    for one in gone.values():
        _book(trees, one, sign=-1)
    quotas = {
        code: snapshot.quotas[code] if not tree.version else tree.snapshot() for code, tree in trees.items()
    }
    return replace(snapshot, running=tuple(running), pending=tuple(pending), quotas=quotas)


def _book(trees: Mapping[str, QuotaTree], one: Running, *, sign: int) -> None:
    tree = trees.get(one.flavour or "")
    if tree is None or one.department_id not in tree.nodes:
        return
    if sign > 0:
        tree.add(one.department_id, one.charge_milli, interruptible=one.interruptible)
        return
    path = [tree.counters[step] for step in tree.path(one.department_id)]
    if all(c.total >= one.charge_milli and c.total_noninterruptible >= one.charge_milli for c in path):
        tree.remove(one.department_id, one.charge_milli, interruptible=one.interruptible)


@settings(max_examples=30, deadline=None)
@given(snapshots() | contested(), st.data())
def test_a_world_that_is_kept_decides_as_a_new_one(snapshot: Snapshot, data: st.DataObject) -> None:
    now = learnt(snapshot)
    world = World(now)
    for _ in range(4):
        kept = decide(now, BALANCING, NOW, world=world)
        assert kept == decide(now, BALANCING, NOW)
        now = after(now, kept, data.draw)
        assert world.follow(now)
    assert decide(now, Policy(), NOW, world=world) == decide(now, Policy(), NOW)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(snapshots() | contested(), st.booleans(), st.integers(1, 8), st.data())
def test_a_wish_is_told_alone_what_it_is_told_in_line(
    snapshot: Snapshot, many: bool, cards: int, data: st.DataObject
) -> None:
    """In a pool at rest, with what the last whole plan promised. Where room can be made for it, whole plans may not try
    that: a longer request of its kind, which failed, stands for both there.
    """
    snapshot = at_rest(crowd(snapshot) if many else snapshot)
    like = ask(1, cards)
    if snapshot.pending and data.draw(st.booleans()):
        like = data.draw(st.sampled_from(snapshot.pending))
    departments = sorted({one.id for rows in snapshot.quotas.values() for one in rows} or {2})  # type: ignore[type-var]
    wish = replace(
        like,
        id=10**9,
        queued_at=NOW,
        department_id=data.draw(st.sampled_from(departments)),
        priority=data.draw(st.integers(0, 2)),
        duration_ms=data.draw(st.sampled_from([None, HOUR, 9 * HOUR])),
        interruptible=data.draw(st.booleans()),
    )
    alone = place_check(snapshot, Policy(), NOW, wish, alone=True)
    whole = place_check(snapshot, Policy(), NOW, wish)
    if alone.waiting is not None and alone.waiting.code == "making_room":
        assert whole.waiting is not None
    else:
        assert alone == whole


def at_rest(snapshot: Snapshot) -> Snapshot:
    """The pool once all that fits has started, with the promises of its plan."""
    for _ in range(4):
        plan = decide(snapshot, Policy(), NOW)
        assume(not (plan.evicts or plan.keeps or plan.moves or plan.layouts))
        if not plan.places:
            return replace(snapshot, promised=plan.reserves)
        snapshot = after(snapshot, plan, lambda _strategy: 1)
    raise UnsatisfiedAssumption


def test_a_world_does_not_follow_to_other_nodes_flavours_or_another_mix() -> None:
    snapshot = learnt(
        pool([node(1)], [ask(1)], [run(1, 1, range(4))], quotas=quota(QuotaNode(1), QuotaNode(2, 1)))
    )
    world = World(snapshot)
    other = learn([ask(9, 8)] * 500, [], FACTS)
    for changed in (
        replace(snapshot, nodes=(node(1, blocked="cordoned"),)),
        replace(snapshot, flavours=FLAVOURS[:1]),
        replace(snapshot, mix=other),
        replace(snapshot, mix=None),
    ):
        assert not world.follow(changed)
        assert world.snapshot is snapshot
    assert world.follow(replace(snapshot, nodes=(node(1),)))


def test_what_ended_and_what_changed_is_followed() -> None:
    rows = (QuotaNode(1, guarantee=8000, total=8000, charged=8000), QuotaNode(2, 1, total=8000, charged=8000))
    full = learnt(
        pool([node(1)], [ask(1, 4)], [run(1, 1, range(4)), run(2, 1, range(4, 8))], quotas=quota(*rows))
    )
    world = World(full)
    assert decide(full, Policy(), NOW, world=world).places == ()
    rows = (QuotaNode(1, guarantee=8000, total=4000, charged=4000), QuotaNode(2, 1, total=4000, charged=4000))
    half = replace(full, running=full.running[1:], quotas=quota(*rows))
    assert world.follow(half)
    places = decide(half, Policy(), NOW, world=world).places
    assert [take.gpu_id for take in places[0].members[0].takes] == [100, 101, 102, 103]
    assert world.with_end == 1
    longer = replace(half, running=(replace(half.running[0], ends_at=NOW + 9 * HOUR),), pending=(ask(1, 8),))
    assert world.follow(longer)
    assert decide(longer, Policy(), NOW, world=world).reserves[0].start_at == NOW + 9 * HOUR
