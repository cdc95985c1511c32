"""Builders of quota rooms for tests: one line a thing, sensible defaults, real services where a service
makes it.
"""

from __future__ import annotations

import itertools
from typing import Any

from portal.accounts.models import Department, Role, RoleBinding, User
from portal.accounts.policy import Policy, policy_of
from portal.kernel.clock import now
from portal.ops.actor import Actor
from quotas.models import FlavourCapacity, GpuFlavour, QuotaUsage

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
