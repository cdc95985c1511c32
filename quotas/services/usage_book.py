"""Many debits in one transaction: the counters of some flavours under locks, judged one after the other, written
once.

Locks as for a single debit: flavours by id (each stands for the root of its tree), then the usage rows of the
departments' paths, root to leaf. Nothing is written before ``write``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from django.db import connection

from portal.kernel.clock import now
from quotas.engine.available import Admission, admit
from quotas.engine.tree import QuotaTree
from quotas.models import FlavourCapacity, GpuFlavour, QuotaUsage
from quotas.selectors.trees import UsageNumbers, build_tree, department_parents, path_of

UPDATE = """
UPDATE quotas_quotausage u
   SET direct = x.direct, direct_noninterruptible = x.hard, charged = x.charged, total = x.total,
       total_noninterruptible = x.total_hard, updated_at = %s
  FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
       AS x(id, direct, hard, charged, total, total_hard)
 WHERE u.id = x.id
"""


@dataclass(slots=True)
class _Row:
    """What the database has of a department and flavour, and the direct use as it is going to be."""

    pk: int
    charged: int
    total: int
    total_noninterruptible: int
    direct: int
    direct_noninterruptible: int


class UsageBook:
    """Trees of ``flavour_ids`` as they stand under locks; must be made inside a transaction."""

    def __init__(self, flavour_ids: Collection[int], department_ids: Collection[int]) -> None:
        if not connection.in_atomic_block:
            raise RuntimeError("row locks need a transaction")
        wanted = sorted(set(flavour_ids))
        locked = GpuFlavour.objects.select_for_update(no_key=True).filter(pk__in=wanted).order_by("pk")
        self.flavours = set(locked.values_list("pk", flat=True))
        parents = department_parents()
        self.departments = set(parents)
        steps = {d for one in department_ids if one in parents for d in path_of(parents, one)}
        self._lock_paths(steps, parents)
        self.rows: dict[tuple[int, int], _Row] = {}
        by_flavour: dict[int, list[UsageNumbers]] = {}
        columns = ("pk", "charged", "total", "total_noninterruptible", *UsageNumbers._fields)
        for row in QuotaUsage.objects.filter(flavour_id__in=wanted).values_list(*columns):
            numbers = UsageNumbers(*row[4:])
            by_flavour.setdefault(numbers.flavour_id, []).append(numbers)
            direct = (numbers.direct, numbers.direct_noninterruptible)
            pk, charged, total, hard = row[:4]
            self.rows[numbers.flavour_id, numbers.department_id] = _Row(pk, charged, total, hard, *direct)
        installed = dict(
            FlavourCapacity.objects.filter(flavour_id__in=wanted).values_list("flavour_id", "installed_milli")
        )
        self.trees: dict[int, QuotaTree] = {
            pk: build_tree(parents, by_flavour.get(pk, []), installed.get(pk)) for pk in wanted
        }
        self._touched: set[int] = set()

    def _lock_paths(self, department_ids: Collection[int], parents: dict[int, int | None]) -> None:
        """Lock the paths' rows root to leaf, with empty ones for departments that have none."""
        depth = {one: len(path_of(parents, one)) for one in department_ids}
        order = sorted(depth, key=lambda one: (depth[one], one))
        missing: list[QuotaUsage] = []
        for flavour_id in sorted(self.flavours):
            rows = QuotaUsage.objects.filter(flavour_id=flavour_id, department_id__in=order)
            known = dict(rows.values_list("department_id", "pk"))
            ids = [known[one] for one in order if one in known]
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT u.id FROM unnest(%s::bigint[]) WITH ORDINALITY AS x(id, place) "
                    "JOIN quotas_quotausage u ON u.id = x.id ORDER BY x.place FOR UPDATE OF u",
                    [ids],
                )
            missing += [
                QuotaUsage(department_id=one, flavour_id=flavour_id, updated_at=now())
                for one in order
                if one not in known
            ]
        QuotaUsage.objects.bulk_create(missing)

    def admit(
        self, *, department_id: int, flavour_id: int, charge_milli: int, interruptible: bool
    ) -> Admission:
        """The quota's answer with everything debited so far counted."""
        return admit(self.trees[flavour_id], department_id, charge_milli, interruptible=interruptible)

    def debit(self, *, department_id: int, flavour_id: int, charge_milli: int, interruptible: bool) -> None:
        """Book what was admitted."""
        row = self.rows[flavour_id, department_id]
        row.direct += charge_milli
        if not interruptible:
            row.direct_noninterruptible += charge_milli
        self.trees[flavour_id].add(department_id, charge_milli, interruptible=interruptible)
        self._touched.add(flavour_id)

    def write(self) -> int:
        """Store the counters that changed, all in one statement; returns how many rows."""
        changed = list(self._changed())
        if changed:
            columns = [list(column) for column in zip(*changed, strict=True)]
            with connection.cursor() as cursor:
                cursor.execute(UPDATE, [now(), *columns])
        return len(changed)

    def _changed(self) -> Iterable[tuple[int, int, int, int, int, int]]:
        for (flavour_id, department_id), row in sorted(self.rows.items()):
            if flavour_id not in self._touched:
                continue
            counters = self.trees[flavour_id].counters[department_id]
            values = (counters.charged, counters.total, counters.total_noninterruptible)
            if values != (row.charged, row.total, row.total_noninterruptible):
                yield (row.pk, row.direct, row.direct_noninterruptible, *values)
