"""Compare what should be equal. A difference is an incident; nothing is mended silently.

* quota counters against the open usage spans of each department's subtree, per flavour;
* the lines of each closed span against its length × charge;
* the sums that pages show against the lines they are of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

from django.db import connection, transaction

from portal.kernel.clock import now
from portal.ops.models import Incident
from portal.ops.services import incident_open, incident_resolve
from quotas.models import GpuFlavour
from quotas.selectors.billing_time import month_of
from quotas.services.ledger import ENDED_EARLIER

SHOWN = 20
"""Differences named in an incident; the rest is counted."""

# One statement reads both sides, so that a lease that starts meanwhile is seen on both or on neither.
COUNTERS = """
WITH RECURSIVE held AS (
    SELECT department_id, flavour_id, sum(charge_milli) AS milli
    FROM quotas_usagespan WHERE ended_at IS NULL GROUP BY 1, 2
), up (department_id, flavour_id, milli) AS (
    SELECT department_id, flavour_id, milli FROM held
    UNION ALL
    SELECT d.parent_id, up.flavour_id, up.milli
    FROM up JOIN accounts_department d ON d.id = up.department_id WHERE d.parent_id IS NOT NULL
), spans AS (
    SELECT department_id, flavour_id, sum(milli)::bigint AS milli FROM up GROUP BY 1, 2
)
SELECT coalesce(u.department_id, s.department_id), coalesce(u.flavour_id, s.flavour_id),
       coalesce(u.total, 0), coalesce(s.milli, 0)
FROM quotas_quotausage u FULL JOIN spans s USING (department_id, flavour_id)
"""

LEDGER = """
SELECT s.id, s.gpu_label, s.should, coalesce(e.gpu_ms, 0)
FROM (
    SELECT id, gpu_label,
           (charge_milli * (floor(extract(epoch FROM ended_at) * 1000)
                            - floor(extract(epoch FROM started_at) * 1000))::bigint) / 1000 AS should
    FROM quotas_usagespan
    WHERE ended_at IS NOT NULL AND (%(since)s::timestamptz IS NULL OR ended_at >= %(since)s)
) s LEFT JOIN LATERAL (
    SELECT sum(gpu_ms) AS gpu_ms FROM quotas_ledgerentry
    WHERE span_id = s.id AND (kind = 'usage' OR reason = %(auto)s)
) e ON true
"""

# Line by line in one statement, so that a booking meanwhile is seen on both sides or on neither.
SUMS = """
SELECT coalesce(a.booked_month, b.booked_month), coalesce(a.department_id_ref, b.department_id_ref),
       coalesce(a.gpu_ms, 0), coalesce(a.micro, 0), coalesce(a.n, 0),
       coalesce(b.gpu_ms, 0), coalesce(b.micro, 0), coalesce(b.n, 0)
FROM (
    SELECT booked_month, local_day, kind, department_id_ref, coalesce(user_id_ref, 0) AS person, flavour_id,
           site_code, cost_code, sum(gpu_ms) AS gpu_ms, sum(amount_micro) AS micro, count(*) AS n
    FROM quotas_ledgerentry WHERE %(month)s::date IS NULL OR booked_month >= %(month)s
    GROUP BY 1, 2, 3, 4, 5, 6, 7, 8
) a FULL JOIN (
    SELECT booked_month, local_day, kind, department_id_ref, coalesce(user_id_ref, 0) AS person, flavour_id,
           site_code, cost_code, sum(gpu_ms) AS gpu_ms, sum(amount_micro) AS micro, sum(lines) AS n
    FROM quotas_ledgersum WHERE %(month)s::date IS NULL OR booked_month >= %(month)s
    GROUP BY 1, 2, 3, 4, 5, 6, 7, 8
) b USING (booked_month, local_day, kind, department_id_ref, person, flavour_id, site_code, cost_code)
"""


@dataclass
class Reconciled:
    """What was compared and what differs. Counters in milli-GPU, ledger in GPU-milliseconds."""

    at: datetime
    counter_rows: int = 0
    counter_milli: int = 0
    span_milli: int = 0
    counter_differences: list[dict[str, Any]] = field(default_factory=list)
    closed_spans: int = 0
    closed_gpu_ms: int = 0
    ledger_gpu_ms: int = 0
    ledger_differences: list[dict[str, Any]] = field(default_factory=list)
    summed_lines: int = 0
    sum_differences: list[dict[str, Any]] = field(default_factory=list)

    @property
    def differences(self) -> int:
        """How many pairs differ."""
        return len(self.counter_differences) + len(self.ledger_differences) + len(self.sum_differences)

    def as_facts(self) -> dict[str, Any]:
        """For the task's row: figures and the first differences."""
        return {
            "counter_rows": self.counter_rows,
            "counter_milli": self.counter_milli,
            "span_milli": self.span_milli,
            "counter_differences": self.counter_differences[:SHOWN],
            "closed_spans": self.closed_spans,
            "closed_gpu_ms": self.closed_gpu_ms,
            "ledger_gpu_ms": self.ledger_gpu_ms,
            "ledger_differences": self.ledger_differences[:SHOWN],
            "summed_lines": self.summed_lines,
            "sum_differences": self.sum_differences[:SHOWN],
            "differences": self.differences,
        }


def reconcile(*, since: datetime | None = None) -> Reconciled:
    """Compare now; `since` limits the ledger's side to spans closed from then on, and the sums to the books from
    that month on.
    """
    result = Reconciled(at=now())
    _counters(result)
    _ledger(result, since)
    _sums(result, month_of(since) if since else None)
    with transaction.atomic():
        _tell("counters_differ", result.counter_differences, Incident.Severity.CRITICAL)
        _tell("ledger_differs", result.ledger_differences, Incident.Severity.CRITICAL)
        _tell("sums_differ", result.sum_differences, Incident.Severity.CRITICAL)
    return result


def _counters(result: Reconciled) -> None:
    codes = dict(GpuFlavour.objects.values_list("pk", "code"))
    with connection.cursor() as cursor:
        cursor.execute("SELECT id, code, parent_id FROM accounts_department")
        departments = {pk: (code, parent) for pk, code, parent in cursor.fetchall()}
        cursor.execute(COUNTERS)
        for department, flavour, counter, spans in cursor.fetchall():
            result.counter_rows += 1
            if departments[department][1] is None:
                result.counter_milli += counter
                result.span_milli += spans
            if counter != spans:
                result.counter_differences.append(
                    {
                        "department": departments[department][0],
                        "flavour": codes.get(flavour, str(flavour)),
                        "counter_milli": counter,
                        "leases_milli": spans,
                    }
                )


def _ledger(result: Reconciled, since: datetime | None) -> None:
    with connection.cursor() as cursor:
        cursor.execute(LEDGER, {"since": since, "auto": ENDED_EARLIER})
        for span, label, should, booked in cursor.fetchall():
            result.closed_spans += 1
            result.closed_gpu_ms += int(should)
            result.ledger_gpu_ms += int(booked)
            if should != booked:
                result.ledger_differences.append(
                    {"span": span, "gpu": label, "lease_gpu_ms": int(should), "ledger_gpu_ms": int(booked)}
                )


def _sums(result: Reconciled, month: date | None) -> None:
    with connection.cursor() as cursor:
        cursor.execute(SUMS, {"month": month})
        for books, department, gpu_ms, micro, n, sum_ms, sum_micro, sum_n in cursor.fetchall():
            result.summed_lines += int(n)
            if (gpu_ms, micro, n) != (sum_ms, sum_micro, sum_n):
                result.sum_differences.append(
                    {
                        "month": f"{books:%Y-%m}",
                        "department": department,
                        "gpu_ms": [int(gpu_ms), int(sum_ms)],
                        "amount_micro": [int(micro), int(sum_micro)],
                        "lines": [int(n), int(sum_n)],
                    }
                )


def _tell(kind: str, differences: list[dict[str, Any]], severity: str) -> None:
    if differences:
        incident_open(
            kind=kind,
            dedupe_key=kind,
            severity=severity,
            facts={"count": len(differences), "differences": differences[:SHOWN]},
        )
    else:
        incident_resolve(dedupe_key=kind, note="the next comparison found no difference")
