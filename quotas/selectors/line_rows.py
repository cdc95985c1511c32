"""Ledger lines as files: for people (head block, formulas made harmless) and for machines (plain)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo

from django.utils.translation import gettext as _

from portal.kernel.tables import GPUS, HOURS, MONEY, Column
from portal.kernel.units import MICRO, MS_PER_HOUR
from quotas.models import LedgerEntry
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.month_report import MonthReport
from quotas.services.ledger import ENDED_EARLIER, TAKEN_TWICE
from quotas.services.prices import PRICED_LATE

MACHINE_COLUMNS = (
    "entry", "uid", "kind", "booked_month", "local_day", "starts_at", "ends_at", "request", "department",
    "user", "cost_code", "flavour", "site", "node", "gpu", "charge_milli", "gpu_ms", "surcharge_ms",
    "micro_per_gpu_hour", "rate_uid", "amount_micro", "currency", "corrects", "reason", "booked_at",
)  # fmt: skip


def hours(gpu_ms: int) -> Decimal:
    """GPU-hours to six decimals, for a cell that people read; the milliseconds stand beside it."""
    return (Decimal(gpu_ms) / MS_PER_HOUR).quantize(Decimal("0.000001"))


def amount(micro: int) -> Decimal:
    """Money, exact."""
    return (Decimal(micro) / MICRO).quantize(Decimal("0.000001"))


def machine_rows(lines: Iterable[Any]) -> Iterator[list[Any]]:
    """Values as stored; times in UTC. A line that still runs has no entry number and `kind` running."""
    for line in lines:
        yield [
            line.id, line.uid if line.id else None, line.kind if line.id else "running", f"{line.booked_month:%Y-%m}",
            line.local_day, line.starts_at, line.ends_at, f"R-{line.request_id_ref}", line.department_path,
            line.user_name, line.cost_code, line.flavour_name, line.site_code, line.node_name, line.gpu_label,
            line.charge_milli, line.gpu_ms, line.surcharge_ms, line.micro_per_gpu_hour, line.rate_uid,
            line.amount_micro, line.currency, line.corrects_id, line.reason, line.booked_at if line.id else None,
        ]  # fmt: skip


def people_columns() -> list[str]:
    """Heads in the reader's language."""
    return [
        _("Entry"), _("Kind"), _("Day"), _("From"), _("To"), _("Request"), _("Department, then"), _("Person"),
        _("Cost centre"), _("Flavour"), _("Site"), _("Node"), _("GPU"), _("Share of card"), _("GPU·h"),
        _("GPU-milliseconds"), _("Surcharge on GPU·h"), _("Price per GPU·h"), _("Cost"), _("Reason"),
    ]  # fmt: skip


def sheet_columns() -> list[Column]:
    """The columns of a workbook of lines."""
    return [
        Column("entry", _("Entry")), Column("kind", _("Kind")), Column("day", _("Day")), Column("from", _("From")),
        Column("to", _("To")), Column("request", _("Request")), Column("department", _("Department, then")),
        Column("person", _("Person")), Column("cost_code", _("Cost centre")), Column("flavour", _("Flavour")),
        Column("site", _("Site")), Column("node", _("Node")), Column("gpu", _("GPU")),
        Column("share", _("Share of card"), GPUS), Column("hours", _("GPU·h"), HOURS),
        Column("surcharge", _("Surcharge on GPU·h"), HOURS, added=False),
        Column("price", _("Price per GPU·h"), MONEY, added=False), Column("cost", _("Cost"), MONEY),
        Column("reason", _("Reason")),
    ]  # fmt: skip


def sheet_rows(lines: Iterable[Any]) -> Iterator[list[Any]]:
    """Raw values of the columns of a workbook."""
    zone, running, kinds = billing_zone(), _("running"), _kinds()
    for line in lines:
        yield [
            str(line.id or running), kinds[line.kind], line.local_day.isoformat(),
            clock_time(line.starts_at, zone),
            clock_time(line.ends_at, zone), f"R-{line.request_id_ref}", line.department_path,
            line.user_name, line.cost_code, line.flavour_name, line.site_code, line.node_name, line.gpu_label,
            line.charge_milli, line.gpu_ms, line.surcharge_ms, line.micro_per_gpu_hour if line.rate_uid else None,
            line.amount_micro,
            reason_text(line.reason),
        ]  # fmt: skip


def _kinds() -> dict[str, str]:
    """The kinds' words in the active language."""
    return {value: str(label) for value, label in LedgerEntry.Kind.choices}


def people_rows(lines: Iterable[Any]) -> Iterator[list[Any]]:
    """Local times of the billing zone; exact money, so that the column adds up to the page's total."""
    zone, running, no_price, kinds = billing_zone(), _("running"), _("no price"), _kinds()
    for line in lines:
        yield [
            line.id or running,
            kinds[line.kind],
            line.local_day,
            clock_time(line.starts_at, zone),
            clock_time(line.ends_at, zone),
            f"R-{line.request_id_ref}",
            line.department_path,
            line.user_name,
            line.cost_code,
            line.flavour_name,
            line.site_code,
            line.node_name,
            line.gpu_label,
            Decimal(line.charge_milli) / 1000,
            hours(line.gpu_ms),
            line.gpu_ms,
            hours(line.surcharge_ms),
            amount(line.micro_per_gpu_hour) if line.rate_uid else no_price,
            amount(line.amount_micro),
            reason_text(line.reason),
        ]


def clock_time(moment: datetime, zone: ZoneInfo) -> str:
    """The time of the pages with its offset, so that the hour that clocks show twice is two."""
    return _clock_time(moment, zone)


@lru_cache(maxsize=8192)
def _clock_time(moment: datetime, zone: ZoneInfo) -> str:
    return moment.astimezone(zone).isoformat(sep=" ", timespec="seconds")


def reason_text(reason: str) -> str:
    """What the installation's own reason codes mean; people's words as they are."""
    if not reason:
        return ""
    known = {
        ENDED_EARLIER: _("The lease turned out to have ended earlier"),
        TAKEN_TWICE: _("Given back: a correction by hand had taken it before the lease's late end did"),
        PRICED_LATE: _("The price was set after it was booked"),
    }
    return known.get(reason, reason)


def group_rows(report: MonthReport) -> Iterator[list[Any]]:
    """The month page's table, with its total as the last row."""
    for group in report.groups:
        yield [
            group.label,
            hours(group.total.gpu_ms),
            group.total.gpu_ms,
            amount(group.total.amount_micro),
            group.total.lines,
            None if group.before_micro is None else amount(group.before_micro),
        ]
    total = report.total
    yield [
        _("Total"),
        hours(total.gpu_ms),
        total.gpu_ms,
        amount(total.amount_micro),
        total.lines,
        amount(report.before.amount_micro),
    ]
