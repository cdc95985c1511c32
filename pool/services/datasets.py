"""Named data sets: where they lie, on which nodes they are cached, who may use them. Requests name them by code.

A data set with a site lies on the shared storage there: every node of it has it. Those that are only on some
nodes name no site, just the nodes that have them cached. Every change is told
to quotas, so that a request can be refused at once where it names what nobody has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from pool.models import Dataset, Node, Site
from pool.services.nodes import require_pool_admin
from portal.accounts.models import Department
from portal.kernel.clock import now
from portal.kernel.errors import Conflict, FieldProblem, Invalid
from portal.kernel.models import advance
from portal.kernel.tabular import Problems, read_table
from portal.ops.actor import Actor
from portal.ops.outbox import outbox_add
from portal.ops.services import audit_record
from quotas.models import PoolName
from quotas.services.capacity import pool_names_write

CODE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")
LARGEST_GIB = 100_000_000
MOST_NODES = 5000
REQUIRED = ("code", "name")
OPTIONAL = ("size_gib", "site", "location", "nodes", "department")
ALIASES = {
    "编码": "code", "名称": "name", "大小": "size_gib", "数据中心": "site", "位置": "location", "节点": "nodes",
    "部门": "department",
}  # fmt: skip


@dataclass
class Wanted:
    """A judged data set that may be written."""

    code: str
    values: dict[str, Any]
    nodes: list[Node] = field(default_factory=list)


def dataset_save(
    *,
    acting_user: Actor,
    values: Mapping[str, Any],
    dataset: Dataset | None = None,
    version: int | None = None,
) -> Dataset:
    """Make a data set, or change one (its code stays). Pool administrators. ``values``: code, name, size_gib,
    site (code), location, nodes (names, a list or text), department (code). Invalid with every problem.
    """
    require_pool_admin(acting_user)
    wanted, problems = _judge(values, dataset)
    if problems:
        raise Invalid(code="invalid", detail=_("Some fields need a change."), errors=problems)
    with transaction.atomic():
        made = _write(wanted, dataset, version)
        _tell(acting_user, "dataset.changed" if dataset is not None else "dataset.created", made)
        datasets_publish()
    return made


def dataset_retire(*, acting_user: Actor, dataset: Dataset, reason: str = "") -> Dataset:
    """No new request may name it; requests that do keep running. Bringing it back is saving it again."""
    require_pool_admin(acting_user)
    with transaction.atomic():
        if not advance(Dataset.objects.filter(pk=dataset.pk, retired_at=None), retired_at=now()):
            raise Conflict(code="wrong_state", detail=_("It is off the list already."))
        dataset.refresh_from_db()
        _tell(acting_user, "dataset.retired", dataset, reason)
        datasets_publish()
    return dataset


def datasets_import(*, acting_user: Actor, data: bytes, name: str, dry_run: bool) -> list[Wanted]:
    """Data sets from CSV or XLSX, all or nothing: columns code, name, size_gib, site, location, nodes (names
    with blanks or semicolons between), department. A known code is brought up to date.
    """
    require_pool_admin(acting_user)
    table = read_table(data, name, aliases=ALIASES)
    table.expect(REQUIRED, OPTIONAL)
    problems, rows, seen = Problems(), [], set()
    known = {row.code: row for row in Dataset.objects.all()}
    for row in table:
        wanted, wrong = _judge(dict(row.cells), known.get(row["code"]))
        for problem in wrong:
            problems.add(row.number, problem["pointer"], problem["detail"])
        if row["code"] in seen:
            problems.add(row.number, "code", _("This code stands in the file twice."))
        seen.add(row["code"])
        rows.append(wanted)
    problems.raise_if_any()
    if dry_run:
        return rows
    with transaction.atomic():
        for wanted in rows:
            made = _write(wanted, known.get(wanted.code), None)
            _tell(acting_user, "dataset.imported", made)
        datasets_publish()
    return rows


def datasets_publish() -> int:
    """Tell quotas which data sets requests may name; returns how many rows changed there."""
    rows: dict[str, dict[str, Any]] = {}
    for row in Dataset.objects.filter(retired_at=None).select_related("site").prefetch_related("cached_on"):
        nodes = len(row.cached_on.all())
        rows[row.code] = {
            "name": row.name,
            "department_id": row.department_id,
            "facts": {
                "size_gib": row.size_gib,
                "site": row.site.code if row.site is not None else "",
                "nodes": nodes,
            },
        }
    return pool_names_write(kind=PoolName.Kind.DATASET, rows=rows)


def _judge(values: Mapping[str, Any], known: Dataset | None) -> tuple[Wanted, list[FieldProblem]]:
    problems: list[FieldProblem] = []

    def wrong(pointer: str, detail: str) -> None:
        problems.append({"pointer": pointer, "detail": detail})

    def text(key: str, most: int) -> str:
        value = values.get(key)
        found = "" if value is None else str(value).strip()
        if len(found) > most or "\x00" in found:
            wrong(key, _("At most {n} signs.").format(n=most))
        return found.replace("\x00", "")[:most]

    code = known.code if known is not None else text("code", 80)
    if not CODE.match(code):
        wrong("code", _("A name of letters, digits, dot, dash and underscore is needed."))
    elif known is None and Dataset.objects.filter(code=code).exists():
        wrong("code", _("There is a data set with this code already."))
    name = text("name", 200)
    if not name:
        wrong("name", _("A name is needed."))
    size = text("size_gib", 12) or "0"
    if not re.fullmatch(r"\d{1,9}", size) or int(size) > LARGEST_GIB:
        wrong("size_gib", _("A whole number of GiB is needed."))
        size = "0"
    site_code, department_code = text("site", 48), text("department", 48)
    site = Site.objects.filter(code=site_code).first() if site_code else None
    if site_code and site is None:
        wrong("site", _("There is no site with the code {code}.").format(code=site_code))
    department = None
    if department_code:
        department = Department.objects.without_tree_fields().filter(code=department_code).first()
        if department is None:
            wrong(
                "department", _("There is no department with the code {code}.").format(code=department_code)
            )
    nodes, unknown = _nodes(values.get("nodes"))
    if unknown:
        wrong("nodes", _("There is no node {names}.").format(names=", ".join(unknown[:5])))
    if site is None and not nodes and not problems:
        wrong("site", _("Say where it lies: a site whose nodes all reach it, or the nodes."))
    fields = {
        "name": name,
        "size_gib": int(size),
        "site": site,
        "location": text("location", 300),
        "department": department,
    }
    return Wanted(code, fields, nodes), problems


def _nodes(sent: Any) -> tuple[list[Node], list[str]]:
    parts = re.split(r"[\s,;]+", sent) if isinstance(sent, str) else list(sent or [])
    names = list(dict.fromkeys(str(part).strip() for part in parts if str(part).strip()))[:MOST_NODES]
    found = {node.name: node for node in Node.objects.filter(name__in=names)}
    return [found[name] for name in names if name in found], [name for name in names if name not in found]


def _write(wanted: Wanted, known: Dataset | None, version: int | None) -> Dataset:
    if known is None:
        made = Dataset.objects.create(code=wanted.code, **wanted.values)
    else:
        rows = Dataset.objects.filter(pk=known.pk)
        if version is not None:
            rows = rows.filter(version=version)
        if not advance(rows, retired_at=None, **wanted.values):
            raise Conflict(
                code="version_changed",
                detail=_("It was changed by somebody else meanwhile. Load it again and repeat the change."),
            )
        made = known
        made.refresh_from_db()
    made.cached_on.set(wanted.nodes)
    return made


def _tell(acting_user: Actor, action: str, dataset: Dataset, reason: str = "") -> None:
    facts = {
        "code": dataset.code,
        "size_gib": dataset.size_gib,
        "site": dataset.site.code if dataset.site is not None else None,
        "nodes": dataset.cached_on.count(),
    }
    audit_record(acting_user=acting_user, action=action, subject=dataset, after=facts, reason=reason)
    outbox_add("pool.datasets_changed", {"dataset": str(dataset.uid)}, key=dataset.code)
