"""Ledger lines of one month of the books as FOCUS 1.2 rows, streamed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from django.conf import settings

from portal.kernel.units import MS_PER_HOUR, cost_micro
from quotas.engine.billing import month_bounds
from quotas.models import LedgerEntry, PriceRate
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.money import Lines, plain_lines

COLUMNS = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd",
    "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "ContractedUnitPrice", "EffectiveCost",
    "InvoiceIssuerName", "ListCost", "ListUnitPrice", "PricingCategory", "PricingQuantity", "PricingUnit",
    "ProviderName", "PublisherName", "RegionId", "ResourceId", "ResourceName", "ResourceType", "ServiceCategory",
    "ServiceName", "SkuId", "SkuPriceId", "SubAccountId", "SubAccountName", "Tags", "x_LedgerEntry",
    "x_GpuMilliseconds", "x_PriceKnown", "x_PowerCost",
)  # fmt: skip
UNIT = "GPU-Hours"
SERVICE = "GPU pool"
FIELDS = (
    "id", "kind", "department_id_ref", "department_path", "user_name", "cost_code", "flavour_name", "flavour__code",
    "site_code", "node_name", "gpu_label", "request_id_ref", "starts_at", "ends_at", "local_day", "gpu_ms",
    "surcharge_ms", "micro_per_gpu_hour", "rate_uid", "amount_micro", "currency",
)  # fmt: skip


def focus_rows(lines: Lines) -> Iterator[list[str]]:
    """One row a booked line of the filter's month, in order of the ledger. What still runs is not billed yet."""
    month = lines.filter.month
    assert month is not None
    start, end = month_bounds(month.year, month.month, billing_zone())
    account = settings.GPUPOOL_ORGANISATION or "GPU pool"
    rows = plain_lines(lines.booked().order_by("id"), FIELDS)
    prices = {
        rate.uid: Price(
            str(rate.uid),
            None if rate.list_micro_per_gpu_hour is None else rate.list_micro + rate.power_micro_per_gpu_hour,
            rate.power_micro_per_gpu_hour,
        )
        for rate in PriceRate.objects.all()
    }
    return _rows(rows, month, utc(start), utc(end), account, prices)


class Price(NamedTuple):
    """Of a rate: its number, list price (None: the one charged) and surcharge for power."""

    uid: str
    listed: int | None
    power: int


NO_PRICE = Price("", None, 0)


@lru_cache(maxsize=4096)
def _tags(cost_code: str, user: str, department: str) -> str:
    return json.dumps({"cost_code": cost_code, "user": user, "department": department}, ensure_ascii=False)


def _rows(
    rows: Iterable[Any],
    month: date,
    start: str,
    end: str,
    account: str,
    prices: Mapping[Any, Price],
) -> Iterator[list[str]]:
    kinds = LedgerEntry.Kind
    of_correction, of_idle = str(kinds.CORRECTION), str(kinds.IDLE)
    price_text = lru_cache(maxsize=1024)(money)
    for line in rows:
        cost = money(line.amount_micro)
        known = line.rate_uid is not None
        price = price_text(line.micro_per_gpu_hour) if known else "0.000000"
        uid, listed, part = (
            NO_PRICE if not known else prices.get(line.rate_uid) or Price(str(line.rate_uid), None, 0)
        )
        idle = line.kind == of_idle
        quantity = hours(line.surcharge_ms if idle else line.gpu_ms)
        micro = None if idle else listed
        for_power = money(cost_micro(line.gpu_ms, part)) if part else "0.000000"
        list_price = price if micro is None else price_text(micro)
        # What a correction of money alone takes back was never on the list.
        list_cost = cost if micro is None or not line.gpu_ms else money(cost_micro(line.gpu_ms, micro))
        # What belongs to a month that was closed before corrects it, whatever its kind; a correction in its own open
        # month changes what is billed there.
        correction = line.kind == of_correction
        earlier = line.local_day < month
        category = "Adjustment" if correction and not earlier else "Usage"
        share = f"{line.flavour_name}, {line.gpu_label or line.node_name}"
        tags = _tags(line.cost_code, line.user_name, line.department_path)
        what = f"{'Correction' if correction else 'Idle surcharge' if idle else 'Use'} of {share}"
        consumed = not correction and not idle  # what is idle was consumed in the row of its use
        stop = line.ends_at if line.ends_at > line.starts_at else None
        yield [
            cost, account, account, line.currency, end, start, category, "Correction" if earlier else "", what,
            "Usage-Based" if not correction else "One-Time", utc(stop) if stop else end, utc(line.starts_at),
            quantity if consumed else "", "Hours" if consumed else "", cost, "" if correction else price,
            cost, account, list_cost, "" if correction else list_price, "" if correction else "Standard", quantity,
            UNIT, account, account, line.site_code, line.gpu_label, line.gpu_label, "GPU", "Compute", SERVICE,
            line.flavour__code, uid, str(line.department_id_ref),
            line.department_path, tags, str(line.id), str(line.gpu_ms),
            "true" if known else "false", for_power,
        ]  # fmt: skip


@lru_cache(maxsize=4096)
def utc(moment: datetime) -> str:
    """A time as FOCUS writes it."""
    at = moment.astimezone(UTC).replace(tzinfo=None)
    return f"{at.isoformat()}Z"


def money(micro: int) -> str:
    """Exact, six decimals."""
    return f"{'-' if micro < 0 else ''}{abs(micro) // 1_000_000}.{abs(micro) % 1_000_000:06d}"


def hours(gpu_ms: int) -> str:
    """GPU-hours to 15 decimals: times a price of up to a million it gives the cost to the last micro unit."""
    whole, rest = divmod((abs(gpu_ms) * 10**15 * 2 + MS_PER_HOUR) // (2 * MS_PER_HOUR), 10**15)
    return f"{'-' if gpu_ms < 0 else ''}{whole}.{rest:015d}"
