"""Builders of quota rooms for tests: one line a thing, sensible defaults, real services where a service
makes it.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import Any

from django.db.backends.postgresql.psycopg_any import DateTimeTZRange

from portal.accounts.models import Department, Role, RoleBinding, User
from portal.accounts.policy import Policy, policy_of
from portal.kernel.clock import now
from portal.ops.actor import Actor
from quotas.models import CapacityRequest, FlavourCapacity, GpuFlavour, PriceRate, QuotaUsage
from quotas.services.requests import request_submit

_n = itertools.count(1)


def department(code: str = "", parent: Department | None = None, **values: Any) -> Department:
    code = code or f"d{next(_n)}"
    return Department.objects.create(
        code=code, name=values.pop("name", code.title()), parent=parent, **values
    )


def user(name: str = "", home: Department | None = None, **values: Any) -> User:
    name = name or f"u{next(_n)}"
    made = User(
        username=name, display_name=values.pop("display_name", name.title()), home_department=home, **values
    )
    made.set_password("secret-for-tests")
    made.save()
    return made


def role(who: User, name: str, where: Department | None = None, **values: Any) -> RoleBinding:
    values.setdefault("valid_from", datetime(2020, 1, 1, tzinfo=UTC))  # tests set the clock to any year
    return RoleBinding.objects.create(user=who, role=Role(name), department=where, **values)


def actor(who: User, via: str = "page", token: str | None = None) -> Actor:
    return Actor(user=who, via=via, token_uid=token)


def policy(who: User) -> Policy:
    return policy_of(who)


def flavour(code: str = "", installed: int | None = 16, node: int = 8, **values: Any) -> GpuFlavour:
    code = code or f"f{next(_n)}"
    values = {"name": code.upper(), "memory_mib": 81920, **values}
    made = GpuFlavour.objects.create(code=code, **values)
    if installed is not None:
        FlavourCapacity.objects.create(
            flavour=made,
            installed_milli=installed * 1000,
            healthy_milli=installed * 1000,
            largest_node_gpus=node,
            updated_at=now(),
        )
    return made


def limits(where: Department, what: GpuFlavour, guaranteed: int = 0, **values: int | None) -> QuotaUsage:
    """Limits in GPUs put on the usage row (as a grant in force would), without the grant's own rows."""
    in_milli = {key: None if value is None else value * 1000 for key, value in values.items()}
    row, _made = QuotaUsage.objects.update_or_create(
        department=where,
        flavour=what,
        defaults={"guaranteed": guaranteed * 1000, "granted": True, "updated_at": now(), **in_milli},
    )
    return row


def price(what: GpuFlavour, per_hour: int, site: str = "") -> PriceRate:
    """A price of so many currency units per GPU-hour, in force since long ago."""
    return PriceRate.objects.create(
        flavour=what,
        site_code=site,
        micro_per_gpu_hour=per_hour * 1_000_000,
        during=DateTimeTZRange(datetime(2020, 1, 1, tzinfo=UTC), None),
    )


class House:
    """Vision / {Video, Perception} under one root, a flavour H of 192 with the figures of the quota page, and
    people: a researcher and a lead of each level, an administrator, a finance officer, an auditor.
    """

    def __init__(self, installed: int = 192) -> None:
        self.vision = department("vision", name="Vision")
        self.video = department("video", self.vision, name="Video")
        self.perception = department("perception", self.vision, name="Perception")
        self.other = department("other", name="Other")
        self.h800 = flavour("h800", installed=installed, name="H800 80GB", nvlink=True, fp8=True)
        limits(self.vision, self.h800, 40, hard_cap=56)
        limits(self.video, self.h800, 24, hard_cap=32)
        limits(self.perception, self.h800, 16, hard_cap=24)
        price(self.h800, 16)
        self.lin = user("lin", self.video, display_name="Lin Yue")
        role(self.lin, "researcher", self.video)
        self.chen = user("chen", self.video, display_name="Chen Hao")
        role(self.chen, "lead", self.video)
        self.wu = user("wu", self.vision, display_name="Wu Tao")
        role(self.wu, "lead", self.vision)
        self.zhao = user("zhao", display_name="Zhao Rui")
        role(self.zhao, "pool_admin")
        self.sun = user("sun", display_name="Sun Mei")
        role(self.sun, "finance")
        self.he = user("he", display_name="He Jing")
        role(self.he, "auditor")
        self.stranger = user("stranger", self.other, display_name="Stranger")
        role(self.stranger, "researcher", self.other)

    def ask(self, **changes: Any) -> dict[str, Any]:
        """Wishes that are complete: one H800 for an hour for Video; ``changes`` override."""
        return {
            "department": self.video.code,
            "flavour": self.h800.code,
            "gpus_per_node": 1,
            "duration_s": 3600,
            "purpose": "a test",
            "command": "python train.py",
            **changes,
        }

    def submit(self, who: User | None = None, **changes: Any) -> CapacityRequest:
        who = who or self.lin
        return request_submit(acting_user=actor(who), policy=policy(who), values=self.ask(**changes))
