"""What holds for every pool, line and policy: no double use, whole gangs, a reason for all that waits, one
plan.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pool.engine.decide import decide
from pool.engine.model import Member, Node, Plan, Policy, Request, Running, Snapshot
from pool.engine.state import PoolState
from quotas.engine.available import admit
from quotas.engine.tree import QuotaNode, QuotaTree
from tests.pool.engine.builders import HOUR, NOW, ask, node, pool, split_node


@st.composite
def nodes(draw: st.DrawFn) -> list[Node]:
    made: list[Node] = []
    for number in range(1, draw(st.integers(1, 5)) + 1):
        if draw(st.integers(0, 4)) == 0:
            layout = draw(st.sampled_from([["3g.20gb", "2g.10gb", "1g.5gb"], ["1g.5gb"] * 7, ["7g.40gb"]]))
            made.append(split_node(number, layout, count=draw(st.integers(1, 2))))
            continue
        made.append(
            node(
                number,
                draw(st.integers(1, 8)),
                draw(st.sampled_from(["A100", "H100", "T4"])),
                cluster_id=draw(st.integers(1, 2)),
                site=draw(st.sampled_from(["bj", "sh"])),
                cpu_milli=draw(st.sampled_from([None, 4000, 64000])),
                memory_mib=draw(st.sampled_from([None, 65536])),
                blocked=draw(st.sampled_from([None, None, None, "cordoned"])),
            )
        )
    return made


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    made: list[Request] = []
    for number in range(1, draw(st.integers(1, 12)) + 1):
        shape = draw(st.sampled_from(["whole", "whole", "fraction", "mig"]))
        common = {
            "department_id": draw(st.integers(2, 4)),
            "priority": draw(st.integers(0, 2)),
            "queued_at": draw(st.integers(0, 5)),
            "interruptible": draw(st.booleans()),
            "duration_ms": draw(st.none() | st.integers(1, 9).map(lambda hours: hours * HOUR)),
            "cpu_milli": draw(st.sampled_from([0, 0, 3000])),
            "start_at": draw(st.sampled_from([None, None, None, NOW + 2 * HOUR])),
        }
        flavours = draw(
            st.lists(st.sampled_from(["A100", "H100", "T4", "X"]), min_size=1, max_size=3, unique=True)
        )
        if shape == "whole":
            size, count = draw(st.integers(1, 8)), draw(st.integers(1, 3))
            made.append(ask(number, size, *flavours, nodes=count, **common))
        elif shape == "fraction":
            milli, mib = draw(st.integers(1, 1000)), draw(st.sampled_from([0, 4096, 20000]))
            made.append(ask(number, 1, *flavours, shape="fraction", milli=milli, share_mib=mib, **common))
        else:
            profile = draw(st.sampled_from(["1g.5gb", "2g.10gb", "1g.10gb"]))
            made.append(
                ask(number, draw(st.integers(1, 3)), *flavours, shape="mig", profile=profile, **common)
            )
    return made


def grants(draw: st.DrawFn) -> dict[str, tuple[QuotaNode, ...]]:
    limit = st.none() | st.integers(0, 12).map(lambda cards: cards * 1000)
    return {
        flavour: (
            QuotaNode(1, guarantee=draw(st.integers(0, 30)) * 1000, hard_cap=draw(limit)),
            *(
                QuotaNode(
                    number,
                    1,
                    guarantee=draw(st.integers(0, 9)) * 1000,
                    hard_cap=draw(limit),
                    borrow_limit=draw(limit),
                    lend_limit=draw(limit),
                )
                for number in (2, 3, 4)
            ),
        )
        for flavour in ("A100", "H100")
    }


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    first = pool(draw(nodes()), draw(requests()), quotas=grants(draw))
    # What the first decision places runs already; the second half of the line comes after it.
    plan = decide(replace(first, pending=first.pending[::2]), Policy(), NOW - HOUR)
    running = started(first, plan)
    trees = {code: QuotaTree(rows) for code, rows in first.quotas.items()}
    for one in running:
        if one.flavour in trees:
            trees[one.flavour].add(one.department_id, one.charge_milli, interruptible=one.interruptible)
    return replace(
        first,
        pending=first.pending[1::2],
        running=running,
        quotas={code: tree.snapshot() for code, tree in trees.items()},
    )


def started(snapshot: Snapshot, plan: Plan) -> tuple[Running, ...]:
    asked = {request.id: request for request in snapshot.pending}
    return tuple(
        Running(
            100 + number, place.request_id, asked[place.request_id].department_id, place.flavour,
            place.charge_milli, place.members, asked[place.request_id].interruptible, ends_at=place.ends_at,
        )
        for number, place in enumerate(plan.places)
    )  # fmt: skip


def used_spans(members: list[Member]) -> None:
    """Fails when two takes of the same card overlap, or a card is charged past 1000."""
    spans: dict[int, list[tuple[int, int]]] = {}
    charges: Counter[int] = Counter()
    slices: Counter[int] = Counter()
    for member in members:
        for take in member.takes:
            spans.setdefault(take.gpu_id, []).extend(take.spans)
            charges[take.gpu_id] += take.charge_milli
            if take.slice_id is not None:
                slices[take.slice_id] += 1
    for held in spans.values():
        held.sort()
        assert all(a[1] <= b[0] for a, b in zip(held, held[1:], strict=False))
        assert all(0 <= low < high <= 1000 for low, high in held)
    assert all(charge <= 1000 for charge in charges.values())
    assert all(count == 1 for count in slices.values())


@settings(max_examples=150, deadline=None)
@given(snapshots())
def test_a_plan_is_sound(snapshot: Snapshot) -> None:
    plan = decide(snapshot, Policy(), NOW)
    asked = {request.id: request for request in snapshot.pending}
    by_node = {one.id: one for one in snapshot.nodes}
    cards = {gpu.id: (one, gpu) for one in snapshot.nodes for gpu in one.gpus}

    used_spans(
        [m for one in snapshot.running for m in one.members] + [m for p in plan.places for m in p.members]
    )
    for place in plan.places:
        request = asked[place.request_id]
        assert len(place.members) == request.nodes
        assert len({member.node_id for member in place.members}) == request.nodes
        assert len({by_node[member.node_id].site for member in place.members}) == 1
        assert sum(take.charge_milli for m in place.members for take in m.takes) == place.charge_milli
        for member in place.members:
            assert len(member.takes) == request.per_node
            assert by_node[member.node_id].blocked is None
            for take in member.takes:
                where, gpu = cards[take.gpu_id]
                assert (where.id, gpu.flavour, gpu.blocked) == (member.node_id, place.flavour, None)
                assert gpu.mig is (request.shape == "mig")

    everyone = [place.request_id for place in plan.places] + [one.request_id for one in plan.waiting]
    assert sorted(everyone) == sorted(asked)
    assert all(one.code and 1 <= one.position <= one.of for one in plan.waiting)
    assert all(one.estimate.earliest < one.estimate.latest for one in plan.waiting if one.estimate)

    trees = {code: QuotaTree(rows) for code, rows in snapshot.quotas.items()}
    for place in plan.places:
        request = asked[place.request_id]
        if place.flavour in trees:
            tree = trees[place.flavour]
            assert admit(
                tree, request.department_id, place.charge_milli, interruptible=request.interruptible
            ).fits
            tree.add(request.department_id, place.charge_milli, interruptible=request.interruptible)


@settings(max_examples=60, deadline=None)
@given(snapshots(), st.randoms(use_true_random=False))
def test_the_order_of_the_snapshot_does_not_matter(snapshot: Snapshot, rng: random.Random) -> None:
    def mixed(rows: tuple) -> tuple:
        rows_ = list(rows)
        rng.shuffle(rows_)
        return tuple(rows_)

    other = Snapshot(
        nodes=tuple(replace(one, gpus=mixed(one.gpus)) for one in mixed(snapshot.nodes)),
        flavours=mixed(snapshot.flavours),
        running=mixed(snapshot.running),
        pending=mixed(snapshot.pending),
        quotas={code: mixed(rows) for code, rows in snapshot.quotas.items()},
        users=snapshot.users,
    )
    assert decide(other, Policy(), NOW) == decide(snapshot, Policy(), NOW)


@settings(max_examples=60, deadline=None)
@given(snapshots())
def test_promises_are_never_delayed_by_what_was_let_pass(snapshot: Snapshot) -> None:
    """At the promised moment, with everything started now still running or ended as told, the places are
    free.
    """
    plan = decide(snapshot, Policy(), NOW)
    for reserve in plan.reserves:
        held = [
            member
            for one in (*snapshot.running, *(p for p in plan.places))
            if one.ends_at is None or max(one.ends_at, NOW + Policy().overdue_ms) > reserve.start_at
            for member in one.members
        ]
        later = PoolState(snapshot.nodes, held)
        for member in reserve.members:
            later.take(member)


@settings(max_examples=40, deadline=None)
@given(snapshots())
def test_what_fits_alone_is_not_left_without_cause(snapshot: Snapshot) -> None:
    """Deciding again right after a plan starts nothing more: the first plan was complete."""
    plan = decide(snapshot, Policy(), NOW)
    rest = tuple(
        request for request in snapshot.pending if request.id not in {p.request_id for p in plan.places}
    )
    trees = {code: QuotaTree(rows) for code, rows in snapshot.quotas.items()}
    running = started(snapshot, plan)
    for one in running:
        if one.flavour in trees:
            trees[one.flavour].add(one.department_id, one.charge_milli, interruptible=one.interruptible)
    again = decide(
        replace(
            snapshot,
            pending=rest,
            running=(
                *snapshot.running,
                *(replace(one, allocation_id=one.allocation_id + 500) for one in running),
            ),
            quotas={code: tree.snapshot() for code, tree in trees.items()},
        ),
        Policy(max_reservations=0),
        NOW,
    )
    waited = {one.request_id: one.code for one in plan.waiting}
    assert all(waited[place.request_id] == "behind" for place in again.places)
