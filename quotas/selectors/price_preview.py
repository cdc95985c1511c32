"""What past use would have cost at another price: asked before a price is set."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from django.db import connection

from portal.accounts.policy import DepartmentTree
from quotas.models import GpuFlavour, PriceRate

# Rounded half up once per line, away from 0 for what a correction takes back, as the ledger rounds.
_SQL = """
SELECT department_id_ref, sum(amount_micro)::bigint,
       sum(sign(gpu_ms) * floor((2 * abs(gpu_ms)::numeric * %(price)s + 3600000) / 7200000))::bigint,
       sum(gpu_ms)::bigint
FROM quotas_ledgerentry
WHERE flavour_id = %(flavour)s AND kind <> 'idle' AND booked_month = %(month)s AND (
    CASE WHEN %(site)s = '' THEN NOT site_code = ANY(%(own)s) ELSE site_code = %(site)s END
) AND (%(inside)s::bigint[] IS NULL OR department_id_ref = ANY(%(inside)s)) AND NOT department_id_ref = ANY(%(apart)s)
GROUP BY 1
"""


@dataclass(frozen=True)
class PreviewRow:
    """One department: booked cost of the month, and the same lines at the other price (micro)."""

    name: str
    was: int
    would: int

    @property
    def difference(self) -> int:
        """More (or less, negative) at the other price."""
        return self.would - self.was


@dataclass(frozen=True)
class Preview:
    """A month of the books at another price of one flavour. Totals are sums of the rows."""

    flavour: GpuFlavour
    site: str
    month: date
    micro_per_gpu_hour: int
    gpu_ms: int
    rows: list[PreviewRow]

    @property
    def was(self) -> int:
        """Booked."""
        return sum(row.was for row in self.rows)

    @property
    def would(self) -> int:
        """At the other price."""
        return sum(row.would for row in self.rows)

    @property
    def difference(self) -> int:
        """More at the other price."""
        return self.would - self.was


def price_preview(
    *,
    flavour: GpuFlavour,
    micro_per_gpu_hour: int,
    site: str,
    month: date,
    tree: DepartmentTree,
    department_id: int | None = None,
) -> Preview:
    """The lines of a month that the price would have held for: of its department and all below it, or for a general
    one of all, without departments below that have prices of their own; of its site, or for all sites of those that
    have none. Corrections of hours are repriced too; corrections of money alone fall away. Surcharges on idle hours
    are no part of it. `micro_per_gpu_hour` is what would be charged, power included.
    """
    set_already = PriceRate.objects.filter(flavour=flavour)
    own = sorted(
        set(
            set_already.filter(department=department_id)
            .exclude(site_code="")
            .values_list("site_code", flat=True)
        )
    )
    inside = None if department_id is None else tree.subtree(department_id)
    owners = set(set_already.filter(department__isnull=False).values_list("department_id", flat=True))
    apart = {
        pk
        for owner in owners - {department_id}
        if owner in tree.rows and (inside is None or owner in inside)
        for pk in tree.subtree(owner)
    }
    with connection.cursor() as cursor:
        cursor.execute(
            _SQL,
            {
                "price": micro_per_gpu_hour,
                "flavour": flavour.pk,
                "month": month,
                "site": site,
                "own": own,
                "inside": inside,
                "apart": sorted(apart),
            },
        )
        found = cursor.fetchall()
    rows = [
        PreviewRow(tree.path(pk) if pk in tree.rows else str(pk), int(was), int(would))
        for pk, was, would, _ms in found
    ]
    rows.sort(key=lambda row: (-abs(row.difference), row.name))
    return Preview(flavour, site, month, micro_per_gpu_hour, sum(int(row[3]) for row in found), rows)
