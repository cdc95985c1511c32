"""The department tree: create, rename, move, close, open again. Names and paths are kept as they were.

All changes of the tree run one after the other (a transaction-level lock), so that two moves cannot make a
cycle together.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange
from django.utils.translation import gettext_lazy as _

from portal.accounts.effects import Effect, department_effects, tell_closed, tell_moved
from portal.accounts.models import Department, DepartmentName, RoleBinding, User
from portal.accounts.policy import DepartmentTree
from portal.accounts.services.common import difference, lock_tree, require_people_admin
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, FieldProblem, Invalid, PreconditionFailed
from portal.kernel.models import advance
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record

DEEPEST = 10
_CODE = re.compile(r"^[a-z0-9][a-z0-9._-]{0,47}$")
_OPEN = {"during__upper_inf": True}


def department_problems(values: dict[str, Any]) -> list[FieldProblem]:
    """What is wrong with a department's own fields (only those given)."""
    found: list[FieldProblem] = []
    if "code" in values and not _CODE.match(values["code"]):
        found.append(
            {"pointer": "code", "detail": _("Small letters, digits, dot, dash and underscore; 48 at most.")}
        )
    if "name" in values and not 0 < len(values["name"]) <= 120:
        found.append({"pointer": "name", "detail": _("A name of 1 to 120 characters is needed.")})
    if "name" in values and " / " in values["name"]:
        found.append({"pointer": "name", "detail": _("A name cannot hold “ / ”: it parts the levels.")})
    if "cost_center" in values and len(values["cost_center"]) > 48:
        found.append({"pointer": "cost_center", "detail": _("48 characters at most.")})
    if "position" in values and not 0 <= values["position"] <= 1_000_000:
        found.append({"pointer": "position", "detail": _("A number from 0 to 1,000,000.")})
    return found


def _refuse(problems: list[FieldProblem]) -> None:
    if problems:
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=problems)


def _sibling_free(tree: DepartmentTree, parent_id: int | None, name: str, but: int | None = None) -> None:
    for pk in tree.children.get(parent_id, []):
        row = tree.rows[pk]
        if pk != but and row.is_open and row.name.casefold() == name.casefold():
            raise Conflict(
                code="name_taken",
                detail=_("There is an open department of this name at this place already."),
                errors=[{"pointer": "name", "detail": _("Taken at this level: choose another one.")}],
            )


def _names_follow(tree: DepartmentTree, ids: list[int], moment: datetime) -> None:
    """Close the running name rows of `ids` where name or path changed, and open new ones at `moment`."""
    running = {
        row.department_id: row for row in DepartmentName.objects.filter(department_id__in=ids, **_OPEN)
    }
    fresh = []
    for pk in ids:
        row, name, path = running.get(pk), tree.rows[pk].name, tree.path(pk)
        if row is not None:
            if (row.name, row.path) == (name, path):
                continue
            if row.during.lower is not None and row.during.lower >= moment:
                row.name, row.path = name, path
                row.save(update_fields=["name", "path"])
                continue
            row.during = DateTimeTZRange(row.during.lower, moment)
            row.save(update_fields=["during"])
        fresh.append(
            DepartmentName(department_id=pk, name=name, path=path, during=DateTimeTZRange(moment, None))
        )
    DepartmentName.objects.bulk_create(fresh)


def _tell(kind: str, row: Department, **more: Any) -> None:
    outbox_add(
        "accounts.department_changed",
        {"department": str(row.uid), "department_id": row.pk, "change": kind, **more},
        key=row.code,
    )


def _locked(department: Department, expected_version: int | None) -> Department:
    lock_tree()
    row: Department = Department.objects.without_tree_fields().select_for_update().get(pk=department.pk)
    if expected_version is not None and row.version != expected_version:
        raise PreconditionFailed(
            code="version_changed",
            detail=_("It was changed by somebody else meanwhile. Load it again and repeat the change."),
            extra={"current_version": row.version},
        )
    return row


def department_create(
    *,
    acting_user: Actor,
    code: str,
    name: str,
    parent: Department | None = None,
    cost_center: str = "",
    position: int = 0,
) -> Department:
    """Add a department below `parent` (None: at the top).

    Errors: `Invalid` by field, `Conflict` for a code or a sibling's name that is taken, or a closed parent.
    """
    require_people_admin(acting_user)
    values = {
        "code": code.strip().lower(),
        "name": name.strip(),
        "cost_center": cost_center.strip(),
        "position": position,
    }
    _refuse(department_problems(values))
    with transaction.atomic():
        lock_tree()
        if Department.objects.filter(code=values["code"]).exists():
            raise Conflict(
                code="code_taken",
                detail=_("Another department has this code; also a closed one keeps its code."),
                errors=[{"pointer": "code", "detail": _("Taken: choose another one.")}],
            )
        tree = DepartmentTree.load()
        if parent is not None:
            _parent_fits(tree, parent.pk, 1)
        _sibling_free(tree, parent.pk if parent is not None else None, str(values["name"]))
        moment = now()
        row = Department.objects.create(parent=parent, created_at=moment, updated_at=moment, **values)
        _names_follow(DepartmentTree.load(), [row.pk], moment)
        audit_record(
            acting_user=acting_user,
            action="department.created",
            subject=row,
            after={**values, "parent": parent.name if parent is not None else None},
            department_id=row.pk,
        )
        _tell("created", row, parent_id=row.parent_id)
    return row


def _parent_fits(tree: DepartmentTree, parent_id: int, height: int) -> None:
    if not tree.rows[parent_id].is_open:
        raise Conflict(
            code="department_closed",
            detail=_("The department above is closed."),
            errors=[{"pointer": "parent", "detail": _("Closed: choose an open one.")}],
        )
    if len(tree.ancestors(parent_id)) + height > DEEPEST:
        raise Invalid.field("parent", _("The tree would be more than 10 levels deep."))


def department_update(
    *,
    acting_user: Actor,
    department: Department,
    name: str | None = None,
    cost_center: str | None = None,
    position: int | None = None,
    expected_version: int | None = None,
) -> Department:
    """Rename, or change cost centre or place among siblings. The code never changes."""
    require_people_admin(acting_user)
    asked = {"name": name, "cost_center": cost_center, "position": position}
    changes = {k: v.strip() if isinstance(v, str) else v for k, v in asked.items() if v is not None}
    _refuse(department_problems(changes))
    with transaction.atomic():
        row = _locked(department, expected_version)
        before, after = difference({k: getattr(row, k) for k in changes}, changes)
        if not after:
            return row
        tree = DepartmentTree.load()
        if "name" in after and row.is_open:
            _sibling_free(tree, row.parent_id, str(changes["name"]), row.pk)
        moment = now()
        advance(Department.objects.filter(pk=row.pk), **{k: changes[k] for k in after})
        row.refresh_from_db()
        if "name" in after:
            tree = DepartmentTree.load()
            _names_follow(tree, tree.subtree(row.pk), moment)
        action = "department.renamed" if "name" in after else "department.changed"
        audit_record(
            acting_user=acting_user,
            action=action,
            subject=row,
            before=before,
            after=after,
            department_id=row.pk,
        )
        _tell("renamed" if "name" in after else "changed", row)
    return row


def department_rename(
    *, acting_user: Actor, department: Department, name: str, expected_version: int | None = None
) -> Department:
    """Rename; reports of the time before keep the old name."""
    return department_update(
        acting_user=acting_user, department=department, name=name, expected_version=expected_version
    )


def department_move(
    *,
    acting_user: Actor,
    department: Department,
    parent: Department | None,
    expected_version: int | None = None,
) -> Department:
    """Hang a department with all below it under another parent (None: at the top).

    Errors: `Conflict` ``cycle`` for itself or one below it, ``department_closed``, or what a room holds
    against it (``in_the_way``, with the list); then nothing has changed.
    """
    require_people_admin(acting_user)
    with transaction.atomic():
        row = _locked(department, expected_version)
        tree = DepartmentTree.load()
        new_id = parent.pk if parent is not None else None
        if new_id == row.parent_id:
            return row
        below = tree.subtree(row.pk)
        if new_id in below:
            raise Conflict(
                code="cycle",
                detail=_("A department cannot hang below itself or one of its own."),
                errors=[
                    {"pointer": "parent", "detail": _("This one lies below the department that you move.")}
                ],
            )
        if new_id is not None:
            _parent_fits(tree, new_id, _height(tree, row.pk))
        _sibling_free(tree, new_id, row.name, row.pk)
        _refuse_blocking(department_effects("move", below))
        old_id, moment = row.parent_id, now()
        advance(Department.objects.filter(pk=row.pk), parent_id=new_id)
        row.refresh_from_db()
        fresh = DepartmentTree.load()
        _names_follow(fresh, below, moment)
        tell_moved(row.pk, old_id, new_id)
        audit_record(
            acting_user=acting_user,
            action="department.moved",
            subject=row,
            before={"path": tree.path(row.pk)},
            after={"path": fresh.path(row.pk)},
            department_id=row.pk,
        )
        _tell("moved", row, old_parent_id=old_id, parent_id=new_id)
    return row


def _height(tree: DepartmentTree, pk: int) -> int:
    return 1 + max((_height(tree, child) for child in tree.children.get(pk, [])), default=0)


def _refuse_blocking(effects: list[Effect]) -> None:
    blocking = [e for e in effects if e.blocks and e.count]
    if blocking:
        raise Conflict(
            code="in_the_way",
            detail=_("Something is in the way: %(what)s.")
            % {"what": "; ".join(f"{e.label}: {e.count}" for e in blocking)},
            extra={"in_the_way": [{"what": str(e.label), "count": e.count} for e in blocking]},
        )


def department_close_effects(department: Department) -> list[Effect]:
    """What closing touches: departments below (must be closed first), people, roles, and what rooms tell."""
    tree = DepartmentTree.load()
    below = tree.subtree(department.pk)
    open_below = sum(1 for pk in below if pk != department.pk and tree.rows[pk].is_open)
    moment = now()
    roles = RoleBinding.objects.filter(department_id__in=below).exclude(valid_to__lte=moment).count()
    people = User.objects.filter(home_department_id__in=below, is_active=True).count()
    return [
        Effect(_("Open departments below it"), open_below, blocks=True),
        Effect(_("People whose home it is"), people),
        Effect(_("Role bindings"), roles),
        *department_effects("close", below),
    ]


def department_close(
    *, acting_user: Actor, department: Department, reason: str, expected_version: int | None = None
) -> Department:
    """Close: nobody asks on its behalf any more, and its quota ends. What runs goes on, and history stays.

    Errors: `Invalid` without a reason, `Conflict` ``in_the_way`` (open departments below, and what rooms hold
    against it).
    """
    require_people_admin(acting_user)
    if not reason.strip():
        raise Invalid.field("reason", _("Say in a sentence why."))
    with transaction.atomic():
        row = _locked(department, expected_version)
        if not row.is_open:
            raise Conflict(code="department_closed", detail=_("This department is closed already."))
        effects = department_close_effects(row)
        _refuse_blocking(effects)
        moment = now()
        advance(Department.objects.filter(pk=row.pk), closed_at=moment)
        row.refresh_from_db()
        audit_record(
            acting_user=acting_user,
            action="department.closed",
            subject=row,
            before={"closed_at": None},
            after={
                "closed_at": moment.isoformat(),
                "touched": {str(e.label): e.count for e in effects if e.count},
            },
            reason=reason.strip(),
            department_id=row.pk,
        )
        tell_closed(acting_user, row.pk, reason.strip())
        _tell("closed", row)
    return row


def department_reopen(*, acting_user: Actor, department: Department) -> Department:
    """Open a closed department again, where its parent is open and its name is still free."""
    require_people_admin(acting_user)
    with transaction.atomic():
        row = _locked(department, None)
        if row.is_open:
            raise Conflict(code="department_open", detail=_("This department is open."))
        tree = DepartmentTree.load()
        if row.parent_id is not None:
            _parent_fits(tree, row.parent_id, 1)
        _sibling_free(tree, row.parent_id, row.name, row.pk)
        before = row.closed_at
        advance(Department.objects.filter(pk=row.pk), closed_at=None)
        row.refresh_from_db()
        audit_record(
            acting_user=acting_user,
            action="department.reopened",
            subject=row,
            before={"closed_at": before.isoformat() if before else None},
            after={"closed_at": None},
            department_id=row.pk,
        )
        _tell("reopened", row)
    return row
