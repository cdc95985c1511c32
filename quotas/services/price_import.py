"""Import of the price book: all rows of a file, or none. What the export for machines gives can come back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, BinaryIO

from django.db import transaction
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import Department
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.kernel.tabular import Problems, Row, Table, read_table
from portal.kernel.units import micro_from_money
from portal.ops.actor import Actor
from quotas.models import GpuFlavour, PriceRate
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.pool_names import site_problem
from quotas.services.prices import may_price, rate_set

REQUIRED = ("flavour",)
OPTIONAL = (
    "site", "department", "price", "micro_per_gpu_hour", "list_price", "list_micro_per_gpu_hour", "power",
    "power_micro_per_gpu_hour", "idle", "idle_micro_per_gpu_hour", "valid_from", "valid_to", "book", "reason", "uid",
    "entered_by",
)  # fmt: skip
ALIASES = {
    "型号": "flavour", "机房": "site", "部门": "department", "单价": "price", "目录价": "list_price",
    "电费附加": "power", "空闲附加": "idle",
    "生效时间": "valid_from", "版本": "book", "理由": "reason", "version": "book",
}  # fmt: skip


@dataclass(frozen=True)
class Taken:
    """A row of the file: what it sets, or that it stands in the book already."""

    number: int
    flavour: GpuFlavour
    site: str
    department: Department | None
    micro: int
    list_micro: int | None
    power_micro: int
    idle_micro: int
    valid_from: datetime
    new: bool


@dataclass(frozen=True)
class _Wanted:
    row: Row
    flavour: GpuFlavour
    site: str
    department: Department | None
    micro: int
    list_micro: int | None
    power_micro: int
    idle_micro: int
    valid_from: datetime
    book: str

    @property
    def key(self) -> tuple[int, str, int | None, datetime]:
        return self.flavour.pk, self.site, getattr(self.department, "pk", None), self.valid_from


class _Undo(Exception):
    """Ends a dry run."""


def prices_import(
    *, acting_user: Actor, file: BinaryIO | bytes, reason: str = "", dry_run: bool = False
) -> list[Taken]:
    """Put the rates of a file in force, oldest first; returns its rows. A row that stands in the book already changes
    nothing. Columns: flavour (code or name), price (money) or micro_per_gpu_hour, and site, department (code),
    list_price, power and idle (surcharges), valid_from (billing zone where it names none; empty: from now on), book,
    reason.

    Invalid (`table_invalid`) with every wrong row and column; then, and with ``dry_run``, nothing is changed.
    """
    may_price(acting_user)
    table = read_table(file, aliases=ALIASES)
    table.expect(REQUIRED, OPTIONAL)
    problems = Problems()
    wanted = _read(table, problems)
    problems.raise_if_any()
    taken: list[Taken] = []
    try:
        with transaction.atomic():
            for one in sorted(wanted, key=lambda w: (w.valid_from, w.row.number)):
                taken.append(_take(acting_user, one, reason, problems))
            problems.raise_if_any()
            if dry_run:
                raise _Undo
    except _Undo:
        pass
    return sorted(taken, key=lambda row: row.number)


def _take(acting_user: Actor, one: _Wanted, reason: str, problems: Problems) -> Taken:
    there = PriceRate.objects.filter(
        flavour=one.flavour,
        site_code=one.site,
        department=one.department,
        micro_per_gpu_hour=one.micro,
        list_micro_per_gpu_hour=one.list_micro,
        power_micro_per_gpu_hour=one.power_micro,
        idle_micro_per_gpu_hour=one.idle_micro,
        during__startswith=one.valid_from,
    ).exists()
    if not there:
        try:
            with transaction.atomic():
                rate_set(
                    acting_user=acting_user,
                    flavour=one.flavour,
                    micro_per_gpu_hour=one.micro,
                    list_micro_per_gpu_hour=one.list_micro,
                    power_micro_per_gpu_hour=one.power_micro,
                    idle_micro_per_gpu_hour=one.idle_micro,
                    valid_from=one.valid_from,
                    site_code=one.site,
                    department=one.department,
                    book=one.book,
                    reason=one.row["reason"] or reason,
                )
        except DomainError as error:
            texts = [str(problem["detail"]) for problem in error.errors] or [str(error.detail)]
            problems.add(one.row.number, "valid_from" if not error.errors else "price", " ".join(texts))
    return Taken(
        one.row.number,
        one.flavour,
        one.site,
        one.department,
        one.micro,
        one.list_micro,
        one.power_micro,
        one.idle_micro,
        one.valid_from,
        not there,
    )


def _flavours() -> dict[str, GpuFlavour]:
    """By code, by code whatever its case, and by the name that pages show where only one has it."""
    every = list(GpuFlavour.objects.all())
    names = Counter(one.name.casefold() for one in every)
    found = {one.name.casefold(): one for one in every if names[one.name.casefold()] == 1}
    return found | {one.code.casefold(): one for one in every} | {one.code: one for one in every}


def _read(table: Table, problems: Problems) -> list[_Wanted]:
    flavours = _flavours()
    departments = {d.code: d for d in Department.objects.without_tree_fields()}
    moment = now()
    found = []
    for row in table:
        flavour = flavours.get(row["flavour"]) or flavours.get(row["flavour"].casefold())
        if flavour is None:
            problems.add(row.number, "flavour", _("There is no such flavour."))
        department = departments.get(row["department"])
        if row["department"] and department is None:
            problems.add(row.number, "department", _("There is no department of this code."))
        if len(row["site"]) > 48:
            problems.add(row.number, "site", _("This is too long."))
        elif problem := site_problem(row["site"]):
            problems.add(row.number, "site", problem)
        micro = _micro(row, "price", "micro_per_gpu_hour", problems, needed=True)
        listed = _micro(row, "list_price", "list_micro_per_gpu_hour", problems, needed=False)
        power = _micro(row, "power", "power_micro_per_gpu_hour", problems, needed=False) or 0
        idle = _micro(row, "idle", "idle_micro_per_gpu_hour", problems, needed=False) or 0
        at = _moment(row, moment, problems)
        if flavour is not None and micro is not None and at is not None:
            found.append(
                _Wanted(
                    row, flavour, row["site"], department, micro, listed, power, idle, at, row["book"][:48]
                )
            )
    counts = Counter(one.key for one in found)
    for one in found:
        if counts[one.key] > 1:
            problems.add(
                one.row.number, "valid_from", _("Another row of the file starts at that very moment.")
            )
    return found


def _micro(row: Row, money: str, micro: str, problems: Problems, *, needed: bool) -> int | None:
    """A price from its column in money or the one in micro; both at once or neither is a problem."""
    given = [name for name in (money, micro) if row[name]]
    if len(given) != 1:
        if given or needed:
            problems.add(row.number, money, _("Give the price once."))
        return None
    text = row[given[0]].replace(",", "")
    try:
        value: Any = Decimal(text)
        found = int(text) if given[0] == micro else micro_from_money(value)
    except (InvalidOperation, ValueError, ArithmeticError):
        problems.add(row.number, given[0], _("This is no amount."))
        return None
    return found


def _moment(row: Row, moment: datetime, problems: Problems) -> datetime | None:
    text = row["valid_from"]
    if not text:
        return moment
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        problems.add(row.number, "valid_from", _("A time is written like 2026-07-01 00:00."))
        return None
    return (at if at.tzinfo is not None else at.replace(tzinfo=billing_zone())).astimezone(UTC)
