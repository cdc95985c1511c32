"""The demo's first stage, before the first page: people, fleet, quotas, prices, a few requests."""

from __future__ import annotations

import json
import secrets
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from pool.models import AgentEnrolment, Cluster, Node, NodeFabric, NodeStorage, Site
from pool.services.agent_inbox import agent_hello
from pool.services.enrolment import DEFAULT_CLUSTER, enrolment_code_create, enrolment_redeem
from portal.accounts.models import Department, User
from portal.accounts.policy import policy_of
from portal.accounts.services.common import quick_hash
from portal.accounts.services.departments import department_create
from portal.accounts.services.roles import role_grant
from portal.accounts.services.users import user_create
from portal.demo import cast, fleet
from portal.kernel.clock import now, set_clock
from portal.kernel.units import micro_from_money
from portal.ops.actor import Actor, system
from portal.ops.models import OutboxEvent
from portal.up.layout import write_atomically
from quotas.engine.billing import day_start, local_day
from quotas.models import GpuFlavour, QuotaGrant
from quotas.selectors.billing_time import billing_zone, month_of, next_month, previous_month
from quotas.services.approval_policy import policy_default_ensure
from quotas.services.grants import limits_apply
from quotas.services.prices import rate_set
from quotas.services.requests import request_submit

DEMO = system("demo", via="command")
FLEET_FILE = "demo-fleet.json"
SIGN_INS = "sign-ins.txt"


def chinese() -> bool:
    """Whether departments and sites get Chinese names: by the installation's language."""
    return str(settings.LANGUAGE_CODE).startswith("zh")


def is_seeded() -> bool:
    """Whether the first stage was done before."""
    return Department.objects.filter(code=cast.DEPARTMENTS[0][0]).exists()


def anchor() -> datetime:
    """The moment the demo began; the history ends there. Kept as the age of the first department."""
    first = Department.objects.get(code=cast.DEPARTMENTS[0][0])
    return first.created_at + timedelta(days=cast.BEFORE)


def seed(folder: Path) -> bool:
    """Make the first stage in one transaction; False when it is there. Writes the fleet file and the sign-ins
    into `folder` before the transaction ends, so that neither exists without the other.
    """
    if is_seeded():
        return False
    begun = now()
    password = secrets.token_urlsafe(9)
    hashed = quick_hash(password)
    with transaction.atomic():
        with set_clock(begun - timedelta(days=cast.BEFORE)):
            departments = _departments()
            people = _people(departments, hashed)
        tokens = _fleet(begun)
        flavours = {f.code: f for f in GpuFlavour.objects.all()}
        _prices(flavours, begun)
        with set_clock(begun - timedelta(days=cast.BEFORE)):
            _quotas(departments, flavours)
            policy_default_ensure()
        _requests(people, flavours)
        _quiet(begun)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FLEET_FILE, json.dumps(fleet.fleet_file(fleet.nodes(), tokens)))
        write_atomically(folder / SIGN_INS, sign_ins(password))
    return True


def sign_ins(password: str) -> str:
    """The lines that `up --demo` prints."""
    titles = {
        "researcher": "researcher",
        "lead": "department lead",
        "pool_admin": "pool administrator",
        "finance": "finance",
        "auditor": "auditor",
    }
    rows = [
        f"{p.username:<10} {password}   {titles[p.roles[0][0]]}"
        for p in cast.PEOPLE
        if p.username in cast.MAIN
    ]
    return (
        "\n".join([*rows, f"The other {len(cast.PEOPLE) - len(rows)} people have the same password."]) + "\n"
    )


def _departments() -> dict[str, Department]:
    made: dict[str, Department] = {}
    for position, (code, parent, english, zh, cost) in enumerate(cast.DEPARTMENTS):
        made[code] = department_create(
            acting_user=DEMO,
            code=code,
            name=zh if chinese() else english,
            parent=made.get(parent),
            cost_center=cost,
            position=position,
        )
    return made


def _people(departments: dict[str, Department], hashed: str) -> dict[str, User]:
    people: dict[str, User] = {}
    for person in cast.PEOPLE:
        user = user_create(
            acting_user=DEMO,
            username=person.username,
            display_name=person.name,
            email=f"{person.username}@example.org",
            home_department=departments[person.department],
            must_change_password=False,
        )
        for role, where in person.roles:
            role_grant(
                acting_user=DEMO, user=user, role=role, department=departments[where] if where else None
            )
        people[person.username] = user
    # One slow hash for all instead of 25: it is the same password.
    User.objects.filter(pk__in=[u.pk for u in people.values()]).update(password=hashed)
    User.objects.filter(username=cast.DATA_ADMIN).update(is_staff=True, is_superuser=True)
    return people


def _fleet(begun: datetime) -> dict[str, str]:
    """Sites, clusters and nodes through enrolment and the agents' own introduction; node → token."""
    clusters: dict[str, Cluster] = {}
    for position, (code, english, zh, zone) in enumerate(cast.SITES):
        site = Site.objects.create(
            code=code, name=zh if chinese() else english, time_zone=zone, simulated=True, position=position
        )
        clusters[code] = Cluster.objects.create(code=f"{code}-agents", name=f"{site.name} · agent", site=site)
    _this_machine_too(clusters[cast.SITES[0][0]])
    tokens: dict[str, str] = {}
    for item in fleet.nodes():
        code = enrolment_code_create(acting_user=DEMO, cluster=clusters[item["site"]], node_name=item["name"])
        enrolled = enrolment_redeem(
            code=code,
            hostname=item["hostname"],
            machine_id=item["machine_id"],
            facts={},
            address=f"10.{20 + item['number']}.0.{10 + item['number']}",
        )
        tokens[item["name"]] = enrolled.token
        node = enrolled.node
        Node.objects.filter(pk=node.pk).update(
            simulated=True,
            nvlink_domain=item["name"] if item["gpus"][0]["nvlink"] else "",
            rack=f"{item['site'][:2].upper()}-R{1 + item['number'] % 4:02d}",
            switch=f"{item['site'][:2]}-leaf-{1 + item['number'] % 2}",
        )
        big = len(item["gpus"]) == 8
        NodeFabric.objects.create(
            node=node, kind="infiniband" if big else "ethernet", speed_gbit_s=400 if big else 100
        )
        NodeStorage.objects.create(node=node, kind="nvme", path="/scratch", size_gib=14_000 if big else 3_500)
        agent_hello(node_id=node.pk, message=fleet.hello_of(item, begun.isoformat()))
    return tokens


def _this_machine_too(cluster: Cluster) -> None:
    """The code that `up` has made for this machine's own agent, before there was any site, leads to the first one."""
    AgentEnrolment.objects.filter(used_at=None).update(cluster=cluster)
    Cluster.objects.filter(code=DEFAULT_CLUSTER, nodes=None).delete()
    Site.objects.filter(clusters=None, simulated=False).delete()


def _prices(flavours: dict[str, GpuFlavour], begun: datetime) -> None:
    """Three versions of the price book, each from midnight of the billing zone: before the history, last month,
    and next month."""
    present = month_of(begun)
    starts = (
        local_day(begun - timedelta(days=cast.BEFORE), billing_zone()),
        previous_month(present),
        next_month(present),
    )
    for index, day in enumerate(starts):
        start = day_start(day, billing_zone())
        with set_clock(min(start, begun)):
            for code, amounts in cast.PRICES.items():
                if (amount := amounts[index]) is not None:
                    rate_set(
                        acting_user=DEMO,
                        flavour=flavours[code],
                        micro_per_gpu_hour=micro_from_money(amount),
                        valid_from=start,
                        book=f"{day:%Y-%m}",
                        reason="demo",
                    )


def _quotas(departments: dict[str, Department], flavours: dict[str, GpuFlavour]) -> None:
    """All grants at once, then the limits of each flavour: the first page waits for this."""
    QuotaGrant.objects.bulk_create(
        [
            QuotaGrant(
                department=departments[department],
                flavour=flavours[code],
                guaranteed=gpus * 1000,
                borrow_limit=None if department == "qinghe" else cast.BORROW_GPUS * 1000,
                during=DateTimeTZRange(now(), None),
                granted_by_name=DEMO.name,
                reason="demo",
            )
            for code, numbers in cast.GRANTS.items()
            for department, gpus in numbers.items()
        ]
    )
    for code in cast.GRANTS:
        limits_apply(flavour_id=flavours[code].pk)


# person, flavour, GPUs, hours, purpose: the first ones pass by themselves, the last ones wait for people
_ASKS: tuple[tuple[str, str, int, int, str], ...] = (
    ("lin.yue", "h800-80gb", 2, 10, "Text-to-video, 720p stage"),
    ("gao.fei", "a100-80gb", 2, 12, "视频生成基线复现"),
    ("zhang.wei", "h800-80gb", 4, 12, "7B base model, 3rd data mix"),
    ("priya.nair", "h20-96gb", 2, 9, "DPO run on preference data v4"),
    ("huang.lei", "l40s-48gb", 2, 11, "排序模型增量训练"),
    ("feng.yu", "a100-80gb", 3, 12, "Docking of 2 M ligands"),
    ("lin.yue", "h800-80gb", 2, 48, "Ablation of the motion module, needs the weekend"),
    ("tang.wei", "a100-80gb", 2, 72, "点云分割训练，第三轮"),
    ("wang.fang", "h800-80gb", 8, 240, "长上下文预训练，第二阶段"),
)


def ask(user: User, flavour: GpuFlavour, gpus: int, hours: int, purpose: str, **more: Any) -> Any:
    """One request of the demo, submitted by its person as now() says."""
    return request_submit(
        acting_user=Actor(user=user, via="page"),
        policy=policy_of(user),
        values={
            "flavour": flavour.code,
            "shape": "whole",
            "gpus_per_node": gpus,
            "duration_s": hours * 3600,
            "purpose": purpose,
            "run_kind": "command",
            "command": "torchrun --nproc-per-node=$NPROC train.py --config configs/run.yaml",
            "environment": {"SIMULATE_SECONDS": str(hours * 3600 - 300)},
            **more,
        },
    )


def _requests(people: dict[str, User], flavours: dict[str, GpuFlavour]) -> None:
    moment = now()
    for number, (person, code, gpus, hours, purpose) in enumerate(_ASKS):
        with set_clock(moment - timedelta(minutes=3 * (len(_ASKS) - number))):
            ask(people[person], flavours[code], gpus, hours, purpose)


def _quiet(begun: datetime) -> None:
    """What was made while the organisation came into being needs no messenger: its events count as delivered,
    except those of the requests that really wait.
    """
    OutboxEvent.objects.filter(done_at=None).exclude(topic__startswith="quotas.request").exclude(
        topic__startswith="quotas.step"
    ).update(done_at=begun)
    connection.run_on_commit = []
