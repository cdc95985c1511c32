"""A year of an enterprise in the database, by bulk inserts: what pages are measured on.

200 departments in three levels, 2,000 people, 50 nodes with 400 cards of six models, 20,000 allocations with
their requests, steps, events, leases, usage spans and ledger lines, and an audit trail of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

DEPARTMENTS, PEOPLE, ALLOCATIONS, NODES, CARDS = 200, 2_000, 20_000, 50, 8
OPEN, WAITING = 180, 200
HOUR_MS = 3_600_000


@dataclass
class Year:
    """What the measured pages are asked for."""

    researcher: Any
    lead: Any
    admin: Any
    finance: Any
    request: Any
    step: Any
    allocation: Any
    node: Any
    gpu: Any
    sizes: dict[str, int]


def _bulk(model: Any, rows: list[Any]) -> list[Any]:
    found: list[Any] = model.objects.bulk_create(rows, batch_size=5_000)
    return found


def _departments(moment: datetime) -> list[Any]:
    from portal.accounts.models import Department, DepartmentName

    root = Department.objects.create(code="org", name="Organisation", created_at=moment, updated_at=moment)
    tops = _bulk(
        Department,
        [Department(code=f"d{i}", name=f"Division {i}", parent=root, position=i) for i in range(19)],
    )
    leaves = _bulk(
        Department,
        [
            Department(
                code=f"t{i}",
                name=f"Team {i}",
                parent=tops[i % len(tops)],
                cost_center=f"CC-{i:04d}",
                position=i,
            )
            for i in range(DEPARTMENTS - 20)
        ],
    )
    paths = [(root, root.name)] + [(t, f"{root.name} / {t.name}") for t in tops]
    paths += [(d, f"{root.name} / {d.parent.name} / {d.name}") for d in leaves]
    _bulk(
        DepartmentName,
        [DepartmentName(department=d, name=d.name, path=p, during=(moment, None)) for d, p in paths],
    )
    return [root, *tops, *leaves]


def _people(departments: list[Any], moment: datetime) -> list[Any]:
    from portal.accounts.models import RoleBinding, User

    leaves, tops = departments[20:], departments[1:20]
    people = _bulk(
        User,
        [
            User(
                username=f"user{i:04d}",
                display_name=f"Person {i:04d}",
                email=f"user{i:04d}@example.org",
                home_department=leaves[i % len(leaves)],
                password="!",
                date_joined=moment,
                language="en",
            )
            for i in range(PEOPLE)
        ],
    )
    roles = [
        RoleBinding(user=u, role="researcher", department=u.home_department, valid_from=moment)
        for u in people[50:]
    ]
    roles += [
        RoleBinding(user=people[i], role="lead", department=tops[i], valid_from=moment) for i in range(19)
    ]
    roles += [RoleBinding(user=people[20], role="pool_admin", valid_from=moment)]
    roles += [RoleBinding(user=people[21], role="finance", valid_from=moment)]
    _bulk(RoleBinding, roles)
    return people


def _fleet(now: datetime) -> tuple[list[Any], list[Any], list[Any]]:
    from pool.models import Cluster, Gpu, Node, Site
    from quotas.models import FlavourCapacity
    from quotas.services.flavours import flavour_ensure

    models = (
        ("NVIDIA H800", 81559), ("NVIDIA A100-SXM4-80GB", 81920), ("NVIDIA H20", 97871), ("NVIDIA L40S", 46068),
        ("NVIDIA L20", 46068), ("NVIDIA A30", 24576),
    )  # fmt: skip
    flavours = [flavour_ensure(model_name=name, memory_mib=mib) for name, mib in models]
    clusters = []
    for i in range(3):
        site = Site.objects.create(code=f"site{i}", name=f"Site {i}", position=i)
        clusters.append(Cluster.objects.create(code=f"c{i}", name=f"Cluster {i}", site=site))
    nodes = _bulk(
        Node,
        [
            Node(
                name=f"n{i:03d}",
                hostname=f"n{i:03d}",
                cluster=clusters[i % 3],
                cpu_milli=128_000,
                memory_mib=1_000_000,
                health="ok",
                last_heartbeat_at=now,
                driver="550.54.15",
                cuda="12.4",
            )
            for i in range(NODES)
        ],
    )
    cards = _bulk(
        Gpu,
        [
            Gpu(
                uuid=f"GPU-{i:08d}",
                node=nodes[i // CARDS],
                flavour=flavours[(i // CARDS) % 6],
                index=i % CARDS,
                model_name=models[(i // CARDS) % 6][0],
                memory_mib=models[(i // CARDS) % 6][1],
                last_seen_at=now,
            )
            for i in range(NODES * CARDS)
        ],
    )
    for flavour in flavours:
        installed = 1000 * sum(card.flavour_id == flavour.pk for card in cards)
        FlavourCapacity.objects.update_or_create(
            flavour=flavour,
            defaults={
                "installed_milli": installed, "healthy_milli": installed, "largest_node_gpus": CARDS, "updated_at": now,
            },
        )  # fmt: skip
    return flavours, nodes, cards


def _quotas(departments: list[Any], flavours: list[Any], moment: datetime) -> None:
    from quotas.models import PriceRate, QuotaGrant
    from quotas.services.grants import limits_apply

    root, tops, leaves = departments[0], departments[1:20], departments[20:]
    grants = []
    for flavour in flavours:
        grants.append(QuotaGrant(department=root, flavour=flavour, guaranteed=60_000, during=(moment, None)))
        grants += [
            QuotaGrant(department=d, flavour=flavour, guaranteed=3_000, during=(moment, None)) for d in tops
        ]
        grants += [
            QuotaGrant(
                department=d, flavour=flavour, guaranteed=0, borrow_limit=16_000, during=(moment, None)
            )
            for d in leaves
        ]
    _bulk(QuotaGrant, grants)
    _bulk(
        PriceRate,
        [
            PriceRate(flavour=f, micro_per_gpu_hour=(i + 2) * 2_000_000, during=(moment, None))
            for i, f in enumerate(flavours)
        ],
    )
    for flavour in flavours:
        limits_apply(flavour_id=flavour.pk)


def build() -> Year:
    """Fill the (empty, migrated) database."""
    from portal.kernel.clock import now as clock

    rng = random.Random(7)
    now = clock().astimezone(UTC)
    moment = now - timedelta(days=370)
    departments = _departments(moment)
    people = _people(departments, moment)
    flavours, nodes, cards = _fleet(now)
    _quotas(departments, flavours, moment)
    from tests.perf._year_work import work

    sizes, found = work(rng, now, departments, people, flavours, cards)
    return Year(
        researcher=found["researcher"],
        lead=people[0],
        admin=people[20],
        finance=people[21],
        request=found["request"],
        step=found["step"],
        allocation=found["allocation"],
        node=nodes[0],
        gpu=cards[0],
        sizes={"departments": len(departments), "people": len(people), "cards": len(cards), **sizes},
    )
