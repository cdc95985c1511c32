"""Small worlds for the money tests."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from portal.accounts.models import Department, DepartmentName, RoleBinding, User
from portal.kernel.clock import set_clock
from portal.ops.actor import SYSTEM
from quotas.models import CapacityRequest, GpuFlavour, PriceRate, QuotaUsage, UsageSpan
from quotas.services.ledger import usage_span_close, usage_span_open
from quotas.services.prices import rate_set

SHANGHAI = ZoneInfo("Asia/Shanghai")
EPOCH = datetime(2020, 1, 1, tzinfo=UTC)


def at(text: str, zone: ZoneInfo | None = SHANGHAI) -> datetime:
    """A local time of the billing zone as UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=zone).astimezone(UTC)


@dataclass
class World:
    """Two departments under one, one flavour, one person; helpers for leases."""

    root: Department
    vision: Department
    search: Department
    flavour: GpuFlavour
    user: User

    def request(self, department: Department | None = None, user: User | None = None) -> CapacityRequest:
        """A request as the ledger sees it."""
        return CapacityRequest.objects.create(
            requester=user or self.user,
            department=department or self.vision,
            flavour=self.flavour,
            charge_milli=1000,
        )

    def lease(
        self,
        start: datetime,
        end: datetime | None = None,
        *,
        charge: int = 1000,
        department: Department | None = None,
        user: User | None = None,
        site: str = "sh",
        flavour: GpuFlavour | None = None,
    ) -> UsageSpan:
        """Open (and with `end` close) one usage span."""
        request = self.request(department, user)
        key = uuid.uuid4()
        with set_clock(start):
            span = usage_span_open(
                key=key,
                request_id=request.pk,
                department_id=request.department_id,
                user_id=request.requester_id,
                flavour_id=(flavour or self.flavour).pk,
                site_code=site,
                node_name="n1",
                gpu_label="n1/0",
                gpu_uid=None,
                charge_milli=charge,
                started_at=start,
            )
        return self.close(span, end) if end else span

    def close(self, span: UsageSpan, end: datetime) -> UsageSpan:
        """Close a span at its end."""
        with set_clock(end):
            return usage_span_close(key=span.key, ended_at=end)

    def price(self, per_hour: str, start: datetime, site: str = "") -> PriceRate:
        """Put a price in force, as the system."""
        from portal.kernel.units import micro_from_money

        with set_clock(start):
            return rate_set(
                acting_user=SYSTEM,
                flavour=self.flavour,
                micro_per_gpu_hour=micro_from_money(per_hour),
                valid_from=start,
                site_code=site,
            )

    def counter(self, department: Department, milli: int) -> None:
        """Make the quota counters of a department and those above it say so."""
        current: Department | None = department
        while current is not None:
            row, _ = QuotaUsage.objects.get_or_create(
                department=current, flavour=self.flavour, defaults={"updated_at": datetime.now(UTC)}
            )
            QuotaUsage.objects.filter(pk=row.pk).update(total=row.total + milli, charged=row.charged + milli)
            current = current.parent


def person(username: str, *roles: tuple[str, Department | None], name: str = "") -> User:
    """A person with roles."""
    user = User.objects.create_user(username, f"{username}@example.org", "x", display_name=name or username)
    for role, department in roles:
        RoleBinding.objects.create(user=user, role=role, department=department, valid_from=EPOCH)
    return user


def named(department: Department, path: str, start: datetime, end: datetime | None = None) -> None:
    """What a department was called in a time."""
    DepartmentName.objects.create(
        department=department, name=path.rpartition(" / ")[2], path=path, during=(start, end)
    )


def world() -> World:
    """The world most tests start from; no price is set."""
    root = Department.objects.create(code="lab", name="Lab")
    vision = Department.objects.create(code="vision", name="Vision", parent=root, cost_center="V-1")
    search = Department.objects.create(code="search", name="Search", parent=root)
    flavour = GpuFlavour.objects.create(code="H800-80GB", name="H800 80GB", memory_mib=81559)
    return World(root, vision, search, flavour, person("lin", ("researcher", vision), name="Lin Yue"))
