"""Import of departments and people from a table: judged as a whole, dry run first, all or nothing.

A row whose code or user name exists changes that one; others are created. Nobody is removed by being absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils.translation import gettext_lazy as _

from portal.accounts.models import Department, Role, RoleBinding, User
from portal.accounts.services.common import lock_tree, quick_hash, require_people_admin, temporary_password
from portal.accounts.services.departments import (
    department_create,
    department_move,
    department_problems,
    department_update,
)
from portal.accounts.services.roles import role_grant
from portal.accounts.services.users import user_create, user_update
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.kernel.tabular import Problems, Row, Table
from portal.ops.actor import Actor

DEPARTMENT_COLUMNS = (("code", "name"), ("parent", "cost_center", "position"))
PEOPLE_COLUMNS = (
    ("username", "name"),
    ("email", "department", "roles", "system_account", "language", "time_zone"),
)
DEPARTMENT_ALIASES = {
    "代码": "code",
    "编码": "code",
    "名称": "name",
    "部门": "name",
    "上级": "parent",
    "上级部门": "parent",
    "成本中心": "cost_center",
    "cost_centre": "cost_center",
    "排序": "position",
}
PEOPLE_ALIASES = {
    "用户名": "username",
    "账号": "username",
    "姓名": "name",
    "邮箱": "email",
    "mail": "email",
    "部门": "department",
    "角色": "roles",
    "role": "roles",
    "系统账号": "system_account",
    "语言": "language",
    "时区": "time_zone",
}


@dataclass(frozen=True)
class ImportRow:
    """What one row does: `act` is create, change or keep; `what` names the fields that change."""

    number: int
    label: str
    act: str
    what: str = ""


@dataclass
class ImportResult:
    """What an import did, or would do. `passwords` (user name, value) exist after a real run only."""

    dry_run: bool
    rows: list[ImportRow] = field(default_factory=list)
    passwords: list[tuple[str, str]] = field(default_factory=list)

    def count(self, act: str) -> int:
        """How many rows do `act`."""
        return sum(1 for row in self.rows if row.act == act)

    @property
    def created(self) -> int:
        """Rows that create."""
        return self.count("create")

    @property
    def changed(self) -> int:
        """Rows that change."""
        return self.count("change")

    @property
    def kept(self) -> int:
        """Rows that say what is so already."""
        return self.count("keep")


@contextmanager
def _all_or_nothing(dry_run: bool) -> Iterator[None]:
    """One transaction for the file; a dry run really does it all and takes it back."""
    with transaction.atomic():
        yield
        if dry_run:
            transaction.set_rollback(True)


def _note(problems: Problems, row: Row, error: DomainError, names: dict[str, str]) -> None:
    """Put what a service refused at the row and column it concerns."""
    if not error.errors:
        problems.add(row.number, next(iter(row.cells), ""), error.detail)
    for problem in error.errors:
        problems.add(row.number, names.get(problem["pointer"], problem["pointer"]), problem["detail"])


def departments_import(*, acting_user: Actor, table: Table, dry_run: bool) -> ImportResult:
    """Columns code, name, and optionally parent (a code, also of a later row), cost_center, position.

    Errors: `Invalid` ``table_invalid`` with every problem by row and column; then nothing was written.
    """
    require_people_admin(acting_user)
    table.expect(*DEPARTMENT_COLUMNS)
    problems = Problems()
    result = ImportResult(dry_run)
    with _all_or_nothing(dry_run):
        lock_tree()
        known = {d.code: d for d in Department.objects.without_tree_fields()}
        ordered = _parents_first(table, known, problems)
        problems.raise_if_any()
        for row in ordered:
            try:
                with transaction.atomic():
                    result.rows.append(_department_row(acting_user, row, known, table.columns))
            except DomainError as error:
                _note(problems, row, error, {})
        problems.raise_if_any()
    result.rows.sort(key=lambda r: r.number)
    return result


def _position(row: Row) -> int | None:
    text = row["position"]
    if not text:
        return None
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 10 else -1


def _parents_first(table: Table, known: dict[str, Department], problems: Problems) -> list[Row]:
    """Rows in an order that makes parents before their children; notes doubled codes, unknown parents, cycles."""
    rows: dict[str, Row] = {}
    for row in table:
        code = row["code"].lower()
        values: dict[str, Any] = {"code": code, "name": row["name"], "cost_center": row["cost_center"]}
        if (position := _position(row)) is not None:
            values["position"] = position
        for problem in department_problems(values):
            problems.add(row.number, problem["pointer"], problem["detail"])
        if code in rows:
            problems.add(
                row.number, "code", _("Row %(row)s has this code already.") % {"row": rows[code].number}
            )
        elif code:
            rows[code] = row
    for code, row in rows.items():
        parent = row["parent"].lower()
        if parent and parent not in rows and parent not in known:
            problems.add(
                row.number, "parent", _("There is no department with the code “%(code)s”.") % {"code": parent}
            )
        if parent == code:
            problems.add(row.number, "parent", _("A department cannot hang below itself."))
    ordered: list[Row] = []
    state: dict[str, int] = {}
    for code in rows:
        chain = []
        current = code
        while current in rows and state.get(current, 0) == 0:
            state[current] = 1
            chain.append(current)
            current = rows[current]["parent"].lower()
        if current in rows and state.get(current) == 1 and current in chain and len(chain) > 1:
            problems.add(rows[current].number, "parent", _("These parents make a circle."))
        for name in reversed(chain):
            state[name] = 2
            ordered.append(rows[name])
    return ordered


def _department_row(
    acting_user: Actor, row: Row, known: dict[str, Department], columns: tuple[str, ...]
) -> ImportRow:
    code, parent_code = row["code"].lower(), row["parent"].lower()
    parent = known[parent_code] if parent_code else None
    position = _position(row)
    found = known.get(code)
    if found is None:
        known[code] = department_create(
            acting_user=acting_user,
            code=code,
            name=row["name"],
            parent=parent,
            cost_center=row["cost_center"],
            position=position or 0,
        )
        return ImportRow(row.number, f"{code} · {row['name']}", "create")
    version = found.version
    what = [n for n, v in (("name", row["name"]),) if getattr(found, n) != v]
    if "cost_center" in columns and found.cost_center != row["cost_center"]:
        what.append("cost_center")
    if position is not None and found.position != position:
        what.append("position")
    fresh = department_update(
        acting_user=acting_user,
        department=found,
        name=row["name"],
        cost_center=row["cost_center"] if "cost_center" in columns else None,
        position=position,
    )
    if "parent" in columns and fresh.parent_id != (parent.pk if parent is not None else None):
        fresh = department_move(acting_user=acting_user, department=fresh, parent=parent)
        what.append("parent")
    known[code] = fresh
    act = "keep" if fresh.version == version else "change"
    return ImportRow(row.number, f"{code} · {row['name']}", act, ", ".join(what))


def people_import(*, acting_user: Actor, table: Table, dry_run: bool) -> ImportResult:
    """Columns username, name, and optionally email, department (a code), roles, system_account, language,
    time_zone.

    `roles`: one or several parted by ``;``, each ``role``, ``role@department-code`` or ``role@*`` (the whole
    installation); a bare role is bound to the row's department. New people get temporary passwords.
    Errors as `departments_import`.
    """
    require_people_admin(acting_user)
    table.expect(*PEOPLE_COLUMNS)
    problems = Problems()
    result = ImportResult(dry_run)
    with _all_or_nothing(dry_run):
        departments = {d.code: d for d in Department.objects.without_tree_fields()}
        people = {u.username: u for u in User.objects.select_related("home_department")}
        seen: dict[str, int] = {}
        fresh: list[tuple[User, str]] = []
        for row in table:
            name = row["username"].lower()
            if name in seen:
                problems.add(
                    row.number, "username", _("Row %(row)s has this name already.") % {"row": seen[name]}
                )
                continue
            seen[name] = row.number
            try:
                with transaction.atomic():
                    done, made = _person_row(acting_user, row, table.columns, departments, people, problems)
            except DomainError as error:
                _note(
                    problems,
                    row,
                    error,
                    {"display_name": "name", "home_department": "department", "role": "roles"},
                )
                continue
            result.rows.append(done)
            if made is not None:
                fresh.append((made, temporary_password()))
        problems.raise_if_any()
        for user, value in fresh:
            User.objects.filter(pk=user.pk).update(
                password=quick_hash(value), must_change_password=True, version=F("version") + 1
            )
        if not dry_run:
            result.passwords = [(user.username, value) for user, value in fresh]
    return result


def _person_row(
    acting_user: Actor,
    row: Row,
    columns: tuple[str, ...],
    departments: dict[str, Department],
    people: dict[str, User],
    problems: Problems,
) -> tuple[ImportRow, User | None]:
    code = row["department"].lower()
    home = departments.get(code)
    if code and home is None:
        problems.add(
            row.number, "department", _("There is no department with the code “%(code)s”.") % {"code": code}
        )
    asked: dict[str, Any] = {"display_name": row["name"]}
    for column, target in (
        ("email", "email"),
        ("system_account", "system_account"),
        ("time_zone", "time_zone"),
    ):
        if column in columns:
            asked[target] = row[column]
    if row["language"]:
        asked["language"] = row["language"]
    if "department" in columns:
        asked["home_department"] = home
    roles = _roles_of(row, home, departments, problems)
    name = row["username"].lower()
    found = people.get(name)
    if found is None:
        made = user_create(acting_user=acting_user, username=name, **asked)
        _bind(acting_user, made, roles)
        return ImportRow(row.number, f"{name} · {row['name']}", "create"), made
    version = found.version
    what = [k for k, v in asked.items() if getattr(found, k) != v]
    fresh = user_update(acting_user=acting_user, user=found, **asked)
    if _bind(acting_user, fresh, roles):
        what.append("roles")
    act = "change" if what or fresh.version != version else "keep"
    return ImportRow(row.number, f"{name} · {row['name']}", act, ", ".join(what)), None


def _roles_of(
    row: Row, home: Department | None, departments: dict[str, Department], problems: Problems
) -> list[tuple[str, Department | None]]:
    out: list[tuple[str, Department | None]] = []
    labels = {str(label).casefold(): value for value, label in Role.choices}
    for part in filter(None, (p.strip() for p in row["roles"].replace("；", ";").split(";"))):
        name, _at, where = (x.strip() for x in part.partition("@"))
        role = name if name in Role.values else labels.get(name.casefold(), "")
        if not role:
            known = ", ".join(Role.values)
            problems.add(
                row.number,
                "roles",
                _("No such role: %(name)s. Known: %(known)s.") % {"name": name, "known": known},
            )
        elif where == "*":
            out.append((role, None))
        elif where:
            if where.lower() in departments:
                out.append((role, departments[where.lower()]))
            else:
                problems.add(
                    row.number,
                    "roles",
                    _("There is no department with the code “%(code)s”.") % {"code": where},
                )
        elif home is not None:
            out.append((role, home))
        else:
            problems.add(
                row.number, "roles", _("Say where: role@department or role@* for the whole installation.")
            )
    return out


def _bind(acting_user: Actor, user: User, roles: list[tuple[str, Department | None]]) -> bool:
    """Bind what is not held yet; whether anything was."""
    bound = False
    for role, where in roles:
        held = RoleBinding.objects.filter(user=user, role=role, department=where).exclude(valid_to__lte=now())
        if not held.exists():
            role_grant(acting_user=acting_user, user=user, role=role, department=where)
            bound = True
    return bound
