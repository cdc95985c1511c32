"""Canonical text and hashes: whatever a snapshot holds comes back equal, and the incremental hash is the whole one."""

from __future__ import annotations

from dataclasses import fields, replace

from pool.engine import mig
from pool.engine.canonical import Print, encode, items, policy_values, snapshot_hash, snapshot_of
from pool.engine.model import (
    Fabric,
    FlavourFacts,
    Gpu,
    Kept,
    Member,
    MinimumRun,
    Mix,
    Node,
    Policy,
    Request,
    Reserve,
    Running,
    Slice,
    Snapshot,
    Take,
    TaskClass,
    UserRoom,
)
from pool.engine.switches import BY_NAME, OF_FLAVOUR
from quotas.engine.tree import QuotaNode

MEMBER = Member(0, 1, 2, 3, (Take(5, ((0, 500), (700, 1000)), 800, 0, slice_id=1),))
FULL = Snapshot(
    nodes=(
        Node(
            1, "n\t💥\n", 2, "bj", (Gpu(5, 0, "h", 80, slices=(Slice(1, "1g", (0, 125), 142, 9),)),),
            driver=(550, 1), fabrics=(Fabric("infiniband", 400, "d"),), storage=frozenset({"nvme", "nfs"}),
            domain=("a", "b"), closed=((1, 2),),
        ),
    ),
    flavours=(FlavourFacts("h", 80, geometry=mig.geometry("A100-40GB")),),
    running=(Running(3, 4, 5, "h", 1000, (MEMBER,)),),
    pending=(Request(9, 5, ("h",), displaced_by=(1, 2)), Request(10, 5, ())),
    quotas={"h": (QuotaNode(0, None, 10), QuotaNode(7, 0, 1, hard_cap=3))},
    users={1: UserRoom(1, 2)},
    kept=(Kept(9, (MEMBER,), 5),),
    user_use={3: 4},
    minimum_run={1: MinimumRun(1)},
    mix=Mix(((TaskClass(1, 2, 3, ("h",)), 4),)),
    promised=(Reserve(9, "h", 77, (MEMBER,)),),
)  # fmt: skip


def test_every_field_of_a_snapshot_is_kept():
    assert all(getattr(FULL, one.name) for one in fields(Snapshot))
    back = snapshot_of([(key, encode(value)) for key, value in items(FULL)])
    assert back == FULL
    assert snapshot_hash(back) == snapshot_hash(FULL)


def test_the_order_of_the_items_never_matters_and_every_change_does():
    turned = replace(FULL, pending=FULL.pending[::-1])
    assert snapshot_hash(turned) == snapshot_hash(FULL)
    hashes = {snapshot_hash(FULL)}
    for one in fields(Snapshot):
        empty = None if one.name == "mix" else type(getattr(FULL, one.name))()
        hashes.add(snapshot_hash(replace(FULL, **{one.name: empty})))
    assert len(hashes) == len(fields(Snapshot)) + 1


def test_the_incremental_hash_is_that_of_the_whole():
    print_ = Print()
    assert print_.take(FULL) == snapshot_hash(FULL)
    assert len(print_.changed) == len(list(items(FULL)))
    print_.changed.clear()
    other = replace(FULL, pending=FULL.pending[:1], nodes=(replace(FULL.nodes[0], name="m"),), users={})
    assert print_.take(other) == snapshot_hash(other)
    assert (print_.changed, print_.gone) == ({("nodes", "1")}, {("pending", "10"), ("users", "#1")})
    assert print_.take(FULL) == snapshot_hash(FULL)
    same = replace(FULL, nodes=(replace(FULL.nodes[0]),))
    print_.changed.clear()
    assert print_.take(same) == snapshot_hash(FULL)
    assert print_.changed == set()


def test_every_switch_of_the_policy_is_known_to_forms_and_checks():
    names = ({one.name for one in fields(Policy)} - {"flavour"}) | set(OF_FLAVOUR)
    assert names == set(BY_NAME)
    assert policy_values(Policy(max_reservations=3)) == {"max_reservations": 3}
    assert policy_values(Policy()) == {}
