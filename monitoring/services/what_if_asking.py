"""The question of a what-if, checked piece by piece before anything is kept."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.utils.translation import gettext_lazy as _

from monitoring.selectors.reports.period import period_from
from pool.engine.past_trace import FLAVOUR, JOB_COLUMNS, QUOTA_COLUMNS, TraceError, trace_past
from pool.engine.switches import SwitchError, checked
from pool.models import SchedulingPolicy
from portal.accounts.policy import Policy
from portal.kernel.errors import Invalid, NotFound
from quotas.models import GpuFlavour
from quotas.services.prices import HIGHEST

LONGEST_DAYS = 92
MOST_JOBS = 100_000
MOST_BYTES = 20_000_000
MOST_NODES = 10_000
MOST_MILLI = 10**9
KNOWN = frozenset({"source", "from", "to", "flavour", "price", "changes"})
CHANGES = frozenset({"quotas", "nodes", "policy", "switches", "borrowing", "prices"})
LIMITS = ("guaranteed", "borrow_limit", "hard_cap")


def packed(data: bytes | None) -> bytes:
    """Compressed for keeping; the same bytes each time."""
    return gzip.compress(data or b"", mtime=0)


def clean(
    params: Mapping[str, Any], policy: Policy, *, jobs: bytes | None, quotas: bytes | None
) -> tuple[dict[str, Any], bool]:
    """(the question as it is kept, whether it is about a recorded workload).

    ``source`` pool with ``from`` and ``to`` (days) and perhaps one ``flavour``; or trace with the two files and
    perhaps a ``price`` (micro per GPU-hour). ``changes``: ``quotas`` [{department, flavour, guaranteed, borrow_limit,
    hard_cap}] in milli-GPU, ``nodes`` {flavour: more or fewer} (cards for a trace), ``policy`` (uid of a version) or
    ``switches``, ``borrowing`` false, ``prices`` {flavour: micro per GPU-hour}. Invalid for anything else.
    """
    unknown = sorted(set(params) - KNOWN)
    if unknown:
        raise Invalid.field(unknown[0], _("This is not known here."))
    source = params.get("source") or "pool"
    if source not in ("pool", "trace"):
        raise Invalid.field("source", _("Known sources: pool, trace."))
    changes = params.get("changes") or {}
    if not isinstance(changes, Mapping):
        raise Invalid.field("changes", _("This is not known here."))
    unknown = sorted(set(changes) - CHANGES)
    if unknown:
        raise Invalid.field(unknown[0], _("This is not known here."))
    kept: dict[str, Any] = {"source": source}
    if source == "trace":
        departments = _trace(jobs, quotas)
        kept["price"] = _micro("price", params.get("price") or 0)
        flavours = {FLAVOUR}
    else:
        if jobs or quotas:
            raise Invalid.field("jobs", _("Files belong to a recorded workload."))
        kept |= _period(params)
        kept["flavour"] = str(params.get("flavour") or "")
        flavours = set(GpuFlavour.objects.values_list("code", flat=True))
        if kept["flavour"] and kept["flavour"] not in flavours:
            raise NotFound(code="not_found", detail=_("There is no such flavour."))
        departments = None
    kept["changes"] = _changes(changes, policy, flavours, departments)
    return kept, source == "trace"


def _period(params: Mapping[str, Any]) -> dict[str, str]:
    period = period_from(
        {"period": "days", "from": str(params.get("from") or ""), "to": str(params.get("to") or "")}
    )
    if period.last - period.first >= timedelta(days=LONGEST_DAYS):
        raise Invalid.field("to", _("Choose 92 days at most."))
    if period.until <= period.start:
        raise Invalid.field("from", _("This period has not begun."))
    return {"from": period.first.isoformat(), "to": period.last.isoformat()}


def rows_of(data: bytes, columns: Sequence[str], field: str) -> list[dict[str, str]]:
    """Rows of a CSV file in UTF-8 that has these columns."""
    if len(data) > MOST_BYTES:
        raise Invalid.field(field, _("The file is too large."))
    try:
        reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""))
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        rows = list(reader) if not missing else []
    except (UnicodeDecodeError, csv.Error) as error:
        raise Invalid.field(field, _("This is no CSV file in UTF-8.")) from error
    if missing:
        raise Invalid.field(field, _("Columns missing: %(columns)s.") % {"columns": ", ".join(missing)})
    if len(rows) > MOST_JOBS:
        raise Invalid.field(field, _("100,000 rows at most."))
    return rows


def _trace(jobs: bytes | None, quotas: bytes | None) -> set[str]:
    if not jobs or not quotas:
        raise Invalid.field(
            "quotas" if jobs else "jobs", _("A recorded workload is two files: jobs and quotas.")
        )
    try:
        trace = trace_past(rows_of(jobs, JOB_COLUMNS, "jobs"), rows_of(quotas, QUOTA_COLUMNS, "quotas"))
    except TraceError as error:
        field = "quotas" if error.column in QUOTA_COLUMNS and error.column != "vc" else "jobs"
        text = _("Row %(row)s: %(column)s does not make sense.") % {"row": error.row, "column": error.column}
        raise Invalid.field(field, text) from error
    return set(trace.departments.values())


def _changes(
    given: Mapping[str, Any], policy: Policy, flavours: set[str], departments: set[str] | None
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    quotas = [_quota(row, policy, flavours, departments) for row in _list(given, "quotas")]
    if len({(row["department"], row["flavour"]) for row in quotas}) < len(quotas):
        raise Invalid.field("quotas", _("One quota is named twice."))
    if quotas:
        out["quotas"] = quotas
    nodes = {
        _flavour(code, flavours, "nodes"): _integer("nodes", n, -MOST_NODES, MOST_NODES)
        for code, n in _mapping(given, "nodes").items()
    }
    if nodes := {code: n for code, n in nodes.items() if n}:
        out["nodes"] = nodes
    prices = {
        _flavour(code, flavours, "prices"): _micro("prices", micro)
        for code, micro in _mapping(given, "prices").items()
    }
    if prices:
        out["prices"] = prices
    if given.get("borrowing", True) not in (True, False):
        raise Invalid.field("borrowing", _("Yes or no."))
    if given.get("borrowing") is False:
        out["borrowing"] = False
    if uid := str(given.get("policy") or ""):
        out["policy"] = str(_version(uid).uid)
    if switches := _mapping(given, "switches"):
        try:
            out["switches"] = checked(switches)
        except SwitchError as error:
            raise Invalid.field(
                error.name, _("This value is not known for a switch of the policy.")
            ) from error
        if not out["switches"]:
            del out["switches"]
    return out


def _version(uid: str) -> SchedulingPolicy:
    try:
        return SchedulingPolicy.objects.get(uid=uid)
    except (SchedulingPolicy.DoesNotExist, ValidationError) as error:
        raise Invalid.field("policy", _("There is no such version of the policy.")) from error


def _quota(row: Any, policy: Policy, flavours: set[str], departments: set[str] | None) -> dict[str, Any]:
    if not isinstance(row, Mapping) or set(row) - {"department", "flavour", *LIMITS}:
        raise Invalid.field("quotas", _("This is not known here."))
    code = str(row.get("department") or "")
    if departments is None:
        known = next((d for d in policy.tree.rows.values() if code in (d.code, str(d.uid))), None)
        if known is None:
            raise Invalid.field("quotas", _("There is no department of this code."))
        code = known.code
    elif code not in departments:
        raise Invalid.field("quotas", _("There is no department of this code."))
    out: dict[str, Any] = {
        "department": code,
        "flavour": _flavour(str(row.get("flavour") or ""), flavours, "quotas"),
    }
    for name in LIMITS:
        if name in row:
            value = row[name]
            if value is None and name != "guaranteed":
                out[name] = None
            else:
                out[name] = _integer("quotas", value, 0, MOST_MILLI)
    return out


def _flavour(code: str, flavours: set[str], field: str) -> str:
    if code not in flavours:
        raise Invalid.field(field, _("There is no such flavour."))
    return code


def _list(given: Mapping[str, Any], name: str) -> list[Any]:
    found = given.get(name) or []
    if not isinstance(found, list) or len(found) > 200:
        raise Invalid.field(name, _("This is not known here."))
    return found


def _mapping(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = given.get(name) or {}
    if not isinstance(found, Mapping) or len(found) > 200:
        raise Invalid.field(name, _("This is not known here."))
    return found


def _integer(field: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise Invalid.field(
            field, _("A whole number between {low} and {high}.").format(low=f"{low:,}", high=f"{high:,}")
        )
    return value


def _micro(field: str, value: Any) -> int:
    return _integer(field, value, 0, HIGHEST)
