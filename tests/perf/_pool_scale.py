"""A pool of any size in the database by bulk inserts: nodes, cards, departments, what runs, what waits.

Sizes follow from the number of cards: a node per 10 cards, 1.5 waiting requests per card, a department per 20
cards. Four kinds of card (two for training with 8 a node, two for sharing with 16), some 92 % held. Seeded: the
same pool each time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

KINDS = (("h800", 81920, 8, 40), ("a800", 81920, 8, 35), ("l20", 49152, 16, 12), ("t4", 16384, 16, 13))
"""Code, MiB, cards a node, share of the nodes in percent."""
FILL = 0.92
BATCH = 2000


@dataclass(slots=True)
class Scale:
    """What was made: flavours by code, leaf departments, people, and the sizes for the report."""

    cards: int
    flavours: dict[str, Any] = field(default_factory=dict)
    leaves: list[Any] = field(default_factory=list)
    people: list[Any] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    debt: dict[str, list[int]] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(7))


def build(cards: int, *, waiting: int | None = None) -> Scale:
    """Fill an empty, migrated database; returns what a measurement needs to go on with it."""
    from django.db import connection

    scale = Scale(cards)
    at = moment()
    _departments(scale, max(10, cards // 20))
    _people(scale)
    _nodes(scale, at)
    _running(scale, at)
    queue(scale, cards * 3 // 2 if waiting is None else waiting, at - timedelta(hours=5))
    _quotas(scale, at)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return scale


def moment() -> datetime:
    from portal.kernel.clock import now

    return now()


def _departments(scale: Scale, count: int) -> None:
    from portal.accounts.models import Department

    tops = [Department(code=f"b{n}", name=f"Branch {n}") for n in range(max(1, count // 50))]
    Department.objects.bulk_create(tops)
    mids = [
        Department(code=f"m{n}", name=f"Division {n}", parent=tops[n % len(tops)])
        for n in range(max(1, count // 7))
    ]
    Department.objects.bulk_create(mids)
    leaves = [
        Department(code=f"t{n}", name=f"Team {n}", parent=mids[n % len(mids)])
        for n in range(max(1, count - len(tops) - len(mids)))
    ]
    Department.objects.bulk_create(leaves)
    scale.leaves = leaves
    scale.sizes["departments"] = len(tops) + len(mids) + len(leaves)


def _people(scale: Scale) -> None:
    from portal.accounts.models import User

    scale.people = [
        User(username=f"p{n}", display_name=f"Person {n}", home_department=leaf, password="!")
        for n, leaf in enumerate(scale.leaves * 2)
    ]
    User.objects.bulk_create(scale.people, batch_size=BATCH)


def _nodes(scale: Scale, at: datetime) -> None:
    from pool.models import Cluster, Gpu, Node, Site
    from quotas.models import FlavourCapacity, GpuFlavour

    site = Site.objects.create(code="bj", name="BJ")
    clusters = [Cluster.objects.create(code=f"c{n}", name=f"c{n}", site=site) for n in range(4)]
    nodes: list[Any] = []
    for code, memory, per_node, share in KINDS:
        scale.flavours[code] = GpuFlavour.objects.create(
            code=code, name=code.upper(), memory_mib=memory, nvlink=per_node == 8
        )
        count = round(scale.cards * share / 1000)
        for _ in range(count):
            nodes.append(
                Node(
                    name=f"n{len(nodes):05d}", cluster=clusters[len(nodes) % 4], health="ok",
                    last_heartbeat_at=at, cpu_milli=per_node * 16000, memory_mib=per_node * 128_000,
                    driver="550.54", cuda="12.4", switch=f"s{len(nodes) // 16}", rack=f"r{len(nodes) // 8}",
                )
            )  # fmt: skip
        FlavourCapacity.objects.create(
            flavour=scale.flavours[code],
            installed_milli=count * per_node * 1000,
            healthy_milli=count * per_node * 1000,
            largest_node_gpus=per_node,
            updated_at=at,
        )
    Node.objects.bulk_create(nodes, batch_size=BATCH)
    per = [(code, memory, per_node) for code, memory, per_node, share in KINDS
           for _ in range(round(scale.cards * share / 1000))]  # fmt: skip
    cards = [
        Gpu(
            uuid=f"GPU-{node.pk:05d}-{index}", node=node, flavour=scale.flavours[code], index=index,
            model_name=code, memory_mib=memory,
        )
        for node, (code, memory, per_node) in zip(nodes, per, strict=True)
        for index in range(per_node)
    ]  # fmt: skip
    Gpu.objects.bulk_create(cards, batch_size=BATCH)
    scale.sizes |= {"gpus": len(cards), "nodes": len(nodes)}


def request_row(scale: Scale, code: str, number: int, at: datetime, **values: Any) -> Any:
    """An unsaved request in the queue: a person of a department asks for cards of one kind. Work that runs belongs
    to the teams in turn, so that most of it lies within guarantees and little is to be taken back.
    """
    from quotas.models import CapacityRequest

    if values.get("state") == "allocated":
        debt = scale.debt.setdefault(code, [0] * len(scale.leaves))
        number = debt.index(min(debt))
        debt[number] += values["charge_milli"]
    who = scale.people[number % len(scale.people)]
    return CapacityRequest(
        requester=who,
        department_id=who.home_department_id,
        flavour=scale.flavours[code],
        **{
            "state": "queued", "queued_at": at, "submitted_at": at, "state_since": at,
            "duration_s": 3600 * scale.rng.choice([1, 2, 4, 8, 24, 72]), "command": "python train.py",
            "run_kind": "command",
            "priority": 60 if values.get("state") == "allocated" or scale.rng.random() < 0.02 else 50,
            "interruptible": scale.rng.random() < 0.8, **values,
        },
    )  # fmt: skip


def ask(scale: Scale, code: str) -> dict[str, Any]:
    """The shape of one ask by the mix: a third of the cards for sharing are asked in fractions."""
    from quotas.engine.charge import fraction_charge

    memory = next(row[1] for row in KINDS if row[0] == code)
    if code in ("l20", "t4") and scale.rng.random() < 0.7:
        milli, mib = scale.rng.choice([(250, memory // 4), (500, memory // 2), (330, memory // 3)])
        return {"shape": "fraction", "gpus_per_node": 1, "fraction_milli": milli, "fraction_mib": mib,
                "charge_milli": fraction_charge(milli, mib, memory)}  # fmt: skip
    per = scale.rng.choice([1, 1, 1, 2, 2, 4, 8])
    nodes = scale.rng.choice([1, 1, 2, 4]) if per == 8 and code in ("h800", "a800") else 1
    return {"gpus_per_node": per, "nodes": nodes, "charge_milli": per * nodes * 1000}


def queue(scale: Scale, count: int, since: datetime) -> list[int]:
    """So many more requests that wait; returns their ids."""
    from quotas.models import CapacityRequest

    codes = scale.rng.choices([row[0] for row in KINDS], [row[3] for row in KINDS], k=count)
    made = CapacityRequest.objects.bulk_create(
        [
            request_row(scale, code, scale.rng.randrange(10**6), since + timedelta(seconds=number), **ask(scale, code))
            for number, code in enumerate(codes)
        ],
        batch_size=BATCH,
    )  # fmt: skip
    scale.sizes["waiting"] = scale.sizes.get("waiting", 0) + count
    return [row.pk for row in made]


def _running(scale: Scale, at: datetime) -> None:
    """Cards are given out node by node, in jobs of 1 to 8 on one node or in fractions, until `FILL` is held."""
    from pool.models import Gpu
    from quotas.models import CapacityRequest

    jobs: list[tuple[Any, list[tuple[Any, int, int]]]] = []
    by_node: dict[int, list[Any]] = {}
    for gpu in Gpu.objects.order_by("node_id", "index").select_related("flavour", "node"):
        by_node.setdefault(gpu.node_id, []).append(gpu)
    for cards in by_node.values():
        code = cards[0].flavour.code
        while cards:
            number = len(jobs)
            if scale.rng.random() > FILL:
                cards.pop()
            elif code in ("l20", "t4") and scale.rng.random() < 0.6:
                card = cards.pop()
                for _ in range(scale.rng.choice([1, 2])):
                    row = request_row(
                        scale, code, number, at, shape="fraction", fraction_milli=500,
                        fraction_mib=card.memory_mib // 2, charge_milli=500, state="allocated",
                    )  # fmt: skip
                    jobs.append((row, [(card, 500, card.memory_mib // 2)]))
            else:
                size = min(len(cards), scale.rng.choice([1, 1, 2, 4, 8]))
                row = request_row(
                    scale, code, number, at, gpus_per_node=size, charge_milli=1000 * size, state="allocated"
                )
                jobs.append((row, [(cards.pop(), 1000, 0) for _ in range(size)]))
    CapacityRequest.objects.bulk_create([row for row, _ in jobs], batch_size=BATCH)
    _leases(scale, jobs, at)
    scale.sizes["running"] = len(jobs)


def _leases(scale: Scale, jobs: list[tuple[Any, list[tuple[Any, int, int]]]], at: datetime) -> None:
    from django.db.backends.postgresql.psycopg_any import DateTimeTZRange, NumericRange

    from pool.models import Allocation, AllocationMember, Lease, LeaseSpan
    from quotas.models import UsageSpan

    allocations, members, leases, spans, usage = [], [], [], [], []
    offset: dict[int, int] = {}
    for row, cards in jobs:
        began = at - timedelta(seconds=scale.rng.randrange(row.duration_s))
        one = Allocation(
            request=row, holder_id=row.requester_id, department_id=row.department_id, flavour=row.flavour,
            charge_milli=row.charge_milli, quota_debited=True, interruptible=row.interruptible,
            priority=row.priority, state="running", state_since=began, reserved_at=began, started_at=began,
            expires_at=began + timedelta(seconds=row.duration_s),
        )  # fmt: skip
        allocations.append(one)
        members.append(
            AllocationMember(
                allocation=one, number=0, node=cards[0][0].node, state="running",
                cpu_milli=len(cards) * 8000, memory_mib=len(cards) * 64_000,
            )
        )  # fmt: skip
        for gpu, milli, mib in cards:
            low = offset.get(gpu.pk, 0)
            offset[gpu.pk] = low + milli
            lease = Lease(allocation=one, gpu=gpu, charge=milli, memory_mib=mib, started_at=began)
            leases.append(lease)
            spans.append(
                LeaseSpan(
                    lease=lease,
                    gpu=gpu,
                    span=NumericRange(low, low + milli),
                    during=DateTimeTZRange(began, None),
                )
            )
            usage.append(
                UsageSpan(
                    key=lease.uid, request=row, department_id=row.department_id, user_id=row.requester_id,
                    flavour=row.flavour, site_code="bj", node_name=gpu.node.name,
                    gpu_label=f"{gpu.node.name}/{gpu.index}", gpu_uid=gpu.uid, charge_milli=milli,
                    started_at=began, accrued_to=began,
                )
            )  # fmt: skip
    for model, rows in (
        (Allocation, allocations), (AllocationMember, members), (Lease, leases), (LeaseSpan, spans), (UsageSpan, usage),
    ):  # fmt: skip
        model.objects.bulk_create(rows, batch_size=BATCH)


def _quotas(scale: Scale, at: datetime) -> None:
    """Guarantees of half of each kind over the teams, and the counters as the leases have them."""
    from django.db.models import Sum

    from pool.models import Allocation, Gpu
    from portal.accounts.models import Department
    from quotas.models import QuotaUsage
    from quotas.services.usage import usage_recompute

    parents = dict(Department.objects.without_tree_fields().values_list("pk", "parent_id"))
    rows = []
    for flavour in scale.flavours.values():
        each = Gpu.objects.filter(flavour=flavour).count() * 500 // len(scale.leaves)
        guarantee: dict[int, int] = {}
        for leaf in scale.leaves:
            step: int | None = leaf.pk
            while step is not None:
                guarantee[step] = guarantee.get(step, 0) + each
                step = parents[step]
        held = Allocation.objects.filter(flavour=flavour).values("department_id", "interruptible")
        direct = {
            (row["department_id"], row["interruptible"]): row["n"]
            for row in held.annotate(n=Sum("charge_milli"))
        }
        for department, amount in guarantee.items():
            hard, soft = direct.get((department, False), 0), direct.get((department, True), 0)
            rows.append(
                QuotaUsage(
                    department_id=department, flavour=flavour, direct=hard + soft, direct_noninterruptible=hard,
                    total=hard + soft, guaranteed=amount, granted=True, updated_at=at,
                )
            )  # fmt: skip
    QuotaUsage.objects.bulk_create(rows, batch_size=BATCH)
    for flavour in scale.flavours.values():
        usage_recompute(flavour_id=flavour.pk)


def give_back(count: int, *, code: str | None = None) -> int:
    """The oldest `count` allocations end and their cards are seen free, by the fewest statements: what closing
    writes, without the outbox. Returns how many.
    """
    from django.db import connection, transaction

    kind = "" if code is None else "AND a.flavour_id = (SELECT id FROM quotas_gpuflavour WHERE code = %s)"
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            f"SELECT id FROM pool_allocation a WHERE state <> 'ended' {kind} ORDER BY id LIMIT %s",
            [*([] if code is None else [code]), count],
        )
        ids = [row[0] for row in cursor.fetchall()]
        cursor.execute(
            "UPDATE pool_leasespan s SET during = tstzrange(lower(during), now(), '[)') FROM pool_lease l "
            "WHERE l.id = s.lease_id AND l.allocation_id = ANY(%s)", [ids]
        )  # fmt: skip
        for sql in (
            "UPDATE pool_lease SET ended_at = now() WHERE allocation_id = ANY(%s)",
            "UPDATE pool_allocationmember SET state = 'free' WHERE allocation_id = ANY(%s)",
            "UPDATE quotas_capacityrequest SET state = 'ended' WHERE id IN (SELECT request_id FROM pool_allocation "
            "WHERE id = ANY(%s))",
            "UPDATE quotas_quotausage u SET direct = u.direct - x.n, direct_noninterruptible = "
            "u.direct_noninterruptible - x.hard FROM (SELECT department_id, flavour_id, sum(charge_milli) n, "
            "coalesce(sum(charge_milli) FILTER (WHERE NOT interruptible), 0) hard FROM pool_allocation "
            "WHERE id = ANY(%s) GROUP BY 1, 2) x WHERE x.department_id = u.department_id AND x.flavour_id = "
            "u.flavour_id",
            "UPDATE pool_allocation SET state = 'ended', ended_at = now(), quota_released_at = now() "
            "WHERE id = ANY(%s)",
        ):
            cursor.execute(sql, [ids])
    from quotas.models import GpuFlavour
    from quotas.services.usage import usage_recompute

    for pk in GpuFlavour.objects.values_list("pk", flat=True):
        usage_recompute(flavour_id=pk)
    return len(ids)
