"""Quotas from a table: CSV or XLSX, dry run first, errors by row and column, all or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from django.db import transaction
from django.utils.translation import gettext as _

from portal.accounts.models import Department
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.errors import Conflict
from portal.kernel.tabular import Problems, Row, read_table
from portal.kernel.units import milli_from_gpus
from portal.ops.actor import Actor
from quotas.models import GpuFlavour
from quotas.selectors.grants import GrantNumbers, grant_numbers, sum_checks
from quotas.services.grants import MOST_MILLI, grant_set, sum_error

REQUIRED = ("department", "flavour", "guaranteed")
OPTIONAL = ("borrow_limit", "lend_limit", "hard_cap", "weight")
ALIASES = {
    "部门": "department",
    "规格": "flavour",
    "保障配额": "guaranteed",
    "借用上限": "borrow_limit",
    "借出上限": "lend_limit",
    "硬上限": "hard_cap",
    "权重": "weight",
}


@dataclass(frozen=True, slots=True)
class ImportRow:
    """One row that would be set: numbers before (None: no grant) and after."""

    department: Department
    flavour: GpuFlavour
    before: GrantNumbers | None
    after: GrantNumbers

    @property
    def changes(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class Imported:
    """The rows of a file, and whether they were only judged."""

    rows: list[ImportRow]
    dry_run: bool


def quotas_import(
    *, acting_user: Actor, policy: Policy | None, data: bytes, name: str, dry_run: bool
) -> Imported:
    """Read, judge, and (unless ``dry_run``) set quotas: columns department, flavour (codes), guaranteed,
    borrow_limit, lend_limit, hard_cap in GPUs (empty = unlimited), weight. Invalid ``table_invalid`` by row
    and column; Conflict ``quota_sum`` where the sums of the whole file do not add up. Administrators only;
    ``policy`` None: the caller is a command of the machine's own administrator.
    """
    if policy is not None:
        policy.require(policy.administers_pool)
    table = read_table(data, name, aliases=ALIASES)
    table.expect(REQUIRED, OPTIONAL)
    problems = Problems()
    departments = {d.code: d for d in Department.objects.without_tree_fields().order_by("pk")}
    flavours = {f.code: f for f in GpuFlavour.objects.order_by("pk")}
    moment, rows, seen = now(), [], set()
    for row in table:
        department, flavour = departments.get(row["department"]), flavours.get(row["flavour"])
        if department is None:
            problems.add(
                row.number,
                "department",
                _("There is no department with the code %(code)s.") % {"code": row["department"]},
            )
        if flavour is None:
            problems.add(
                row.number,
                "flavour",
                _("There is no flavour with the code %(code)s.") % {"code": row["flavour"]},
            )
        numbers = _numbers(row, problems)
        if department is None or flavour is None:
            continue
        if (department.pk, flavour.pk) in seen:
            problems.add(row.number, "department", _("This department and flavour stand in the file twice."))
        seen.add((department.pk, flavour.pk))
        rows.append(ImportRow(department, flavour, grant_numbers(department.pk, flavour.pk, moment), numbers))
    problems.raise_if_any()
    with transaction.atomic():
        _sums(rows)
        if not dry_run:
            for item in (r for r in rows if r.changes):
                grant_set(
                    acting_user=acting_user, policy=policy, department=item.department, flavour=item.flavour,
                    **item.after.as_fields(), reason=_("import of %(name)s") % {"name": name or "CSV"}, override=True,
                )  # fmt: skip
    return Imported(rows, dry_run)


def _sums(rows: list[ImportRow]) -> None:
    """The sums after the whole file: single rows may pass through states that do not add up."""
    by_flavour: dict[int, dict[int, GrantNumbers | None]] = {}
    for row in rows:
        by_flavour.setdefault(row.flavour.pk, {})[row.department.pk] = row.after
    for flavour_id, changes in by_flavour.items():
        for check in sum_checks(changes, flavour_id, now()):
            if not check.holds:
                error: Conflict = sum_error(check)
                raise error


def _numbers(row: Row, problems: Problems) -> GrantNumbers:
    values: dict[str, int | None] = {}
    for column in ("guaranteed", "borrow_limit", "lend_limit", "hard_cap"):
        text = row[column]
        if text == "":
            values[column] = None
            if column == "guaranteed":
                problems.add(row.number, column, _("A number of GPUs is needed here (0 for none)."))
            continue
        try:
            milli = milli_from_gpus(Decimal(text.replace(",", "")))
        except (ValueError, InvalidOperation):
            problems.add(row.number, column, _("GPUs with at most three decimals, for example 24 or 0.5."))
            continue
        if not 0 <= milli <= MOST_MILLI:
            problems.add(row.number, column, _("0 or more is needed here."))
        values[column] = milli
    weight = row["weight"] or "1"
    if not weight.isdecimal() or len(weight) > 6:
        problems.add(row.number, "weight", _("A whole number, 0 or more."))
        weight = "1"
    cap, guaranteed = values.get("hard_cap"), values.get("guaranteed") or 0
    if cap is not None and cap < guaranteed:
        problems.add(
            row.number, "hard_cap", _("A hard cap below the guarantee would make the guarantee void.")
        )
    return GrantNumbers(guaranteed, values.get("borrow_limit"), values.get("lend_limit"), cap, int(weight))
