"""Small parts for monitoring tests: a fleet, people, a held card, messages as agents send them."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta
from typing import Any

from pool.models import Allocation, AllocationMember, Cluster, Gpu, Lease, MigSlice, Node, Site
from portal.accounts.models import Department, Role, RoleBinding, User
from portal.kernel.clock import now
from quotas.models import CapacityRequest, GpuFlavour

_number = itertools.count(1)


def department(code: str = "vision", parent: Department | None = None) -> Department:
    found = Department.objects.filter(code=code).first()
    return found or Department.objects.create(code=code, name=code.title(), parent=parent)


def person(username: str, role: str = Role.RESEARCHER, where: Department | None = None) -> User:
    user = User.objects.create_user(username, f"{username}@example.org", "correct horse battery")
    user.display_name, user.language, user.home_department = username.title(), "en", where
    user.save()
    RoleBinding.objects.create(user=user, role=role, department=where)
    return user


def flavour(code: str = "h800-80g", **more: Any) -> GpuFlavour:
    found = GpuFlavour.objects.filter(code=code).first()
    return found or GpuFlavour.objects.create(code=code, name=code.upper(), memory_mib=81559, **more)


def node(
    name: str = "sh-h800-01",
    gpus: int = 2,
    *,
    site: str = "shanghai",
    model: str = "NVIDIA H800",
    **more: Any,
) -> Node:
    where, _ = Site.objects.get_or_create(code=site, defaults={"name": site.title()})
    cluster, _ = Cluster.objects.get_or_create(code=f"{site}-agents", defaults={"name": site, "site": where})
    made = Node.objects.create(
        name=name, cluster=cluster, cpu_milli=64_000, memory_mib=1_048_576, **{"health": "ok", **more}
    )
    for index in range(gpus):
        gpu(made, index, model=model)
    return made


def gpu(where: Node, index: int, *, model: str = "NVIDIA H800", **more: Any) -> Gpu:
    number = next(_number)
    return Gpu.objects.create(
        uuid=more.pop("uuid", f"GPU-{number:08x}-0000-4000-8000-{number:012x}"),
        node=where,
        index=index,
        model_name=model,
        memory_mib=81559,
        flavour=flavour(),
        power_limit_mw=700_000,
        **more,
    )


def slice_of(card: Gpu, instance: int, start: int, size: int, profile: str = "3g.40gb") -> MigSlice:
    return MigSlice.objects.create(
        gpu=card,
        uuid=f"MIG-{card.uuid[4:]}-{instance}",
        profile=profile,
        gpu_instance=instance,
        start=start,
        size=size,
    )


def held(
    card: Gpu,
    holder: User,
    where: Department,
    *,
    state: str = "running",
    since: datetime | None = None,
    mig_slice: MigSlice | None = None,
) -> Lease:
    since = since or now() - timedelta(hours=1)
    request = CapacityRequest.objects.create(
        requester=holder, department=where, state="allocated", duration_s=7200
    )
    allocation = Allocation.objects.create(
        request=request,
        holder=holder,
        department=where,
        flavour=card.flavour,
        charge_milli=1000,
        state=state,
        started_at=since,
        expires_at=now() + timedelta(hours=2),
    )
    AllocationMember.objects.create(allocation=allocation, number=0, node=card.node, state="running")
    return Lease.objects.create(
        allocation=allocation, gpu=card, charge=1000, started_at=since, mig_slice=mig_slice
    )


def values(**changes: Any) -> dict[str, Any]:
    """Values of a healthy busy card; a change to None leaves the measure out."""
    base = {
        "util": 93,
        "mem_used": 73728,
        "mem_total": 81559,
        "mem_reserved": 600,
        "temp": 66,
        "power_mw": 621_000,
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def row(
    card: Gpu | str,
    at: datetime | None = None,
    *,
    mig: str | None = None,
    missing: dict[str, str] | None = None,
    procs: list[dict[str, Any]] | None = None,
    **changes: Any,
) -> list[Any]:
    uuid = card if isinstance(card, str) else card.uuid
    default = [{"pid": 4711, "name": "python", "user": "wutao", "mem_mib": 72000}]
    moment = (at or now()).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return [
        uuid,
        mig,
        moment,
        values(**changes),
        missing or {"sm": "not_supported"},
        default if procs is None else procs,
    ]


def message(*rows: list[Any], **more: Any) -> dict[str, Any]:
    return {"t": "samples", "seq": 1, "rows": list(rows), **more}
