"""Chargeback: what stands in the books of the months of a period, corrections told apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace
from datetime import date, timedelta

from django.db.models import Q, QuerySet, Sum
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from monitoring.selectors.reports.base import Answer, Ask, Stat, part_sum
from monitoring.selectors.reports.period import Period, passed_of
from monitoring.selectors.reports.used import drill, group_word, groups_of, label_of, stacked
from portal.kernel.clock import now
from portal.kernel.tables import COUNT, HOURS, MONEY, PERCENT, Column, Table, share
from quotas.engine.billing import local_day
from quotas.models import LedgerEntry, LedgerSum
from quotas.selectors.billing_time import billing_zone, first_of_month, next_month
from quotas.selectors.month_report import Group, name_users

BOOK_COLUMNS = {
    "department": "department_id_ref",
    "flavour": "flavour_id",
    "user": "user_id_ref",
    "site": "site_code",
    "cost_code": "cost_code",
    "month": "booked_month",
}
CORRECTION = Q(kind=LedgerEntry.Kind.CORRECTION)
IDLE = Q(kind=LedgerEntry.Kind.IDLE)


def booked(ask: Ask) -> QuerySet[LedgerSum]:
    """The kept sums of the books of all months that the period touches, as the reader may see them."""
    first, last = first_of_month(ask.period.first), first_of_month(ask.period.last)
    scope, chosen = ask.policy.reads_money, ask.chosen
    query = Q(booked_month__range=(first, last))
    if not scope.everything:
        query &= scope.q("department_id_ref") | Q(user_id_ref=ask.policy.user.pk)
    if chosen.department_id is not None:
        query &= Q(department_id_ref__in=ask.policy.tree.subtree(chosen.department_id))
    if chosen.user is not None:
        query &= Q(user_id_ref=chosen.user.pk)
    if chosen.flavour is not None:
        query &= Q(flavour_id=chosen.flavour.pk)
    if chosen.site:
        query &= Q(site_code=chosen.site)
    return LedgerSum.objects.filter(query)


def chargeback(ask: Ask) -> Answer:
    """Booked hours and money by group: usage, corrections, and what is to be charged."""
    rows = (
        booked(ask)
        .values_list(BOOK_COLUMNS[ask.by])
        .annotate(
            h=Sum("gpu_ms", filter=~CORRECTION, default=0),
            m=Sum("amount_micro", filter=~CORRECTION, default=0),
            ch=Sum("gpu_ms", filter=CORRECTION, default=0),
            cm=Sum("amount_micro", filter=CORRECTION, default=0),
            n=Sum("lines"),
            p=Sum("power_micro", filter=~CORRECTION, default=0),
            i=Sum("amount_micro", filter=IDLE, default=0),
        )
    )
    groups, fold = groups_of(ask)
    sums: dict[Hashable, list[int]] = defaultdict(lambda: [0] * 7)
    for key, *values in rows:
        entry = sums[fold(key)]
        for i, value in enumerate(values):
            entry[i] += value
    for key in sums:
        groups[key]
    if ask.by == "user":
        name_users(groups.values())
    power, idle = sum(v[5] for v in sums.values()), sum(v[6] for v in sums.values())
    table = Table(_("Chargeback"), _columns(ask, power=power != 0, idle=idle != 0))
    whole = sum(v[1] + v[3] for v in sums.values())
    for key, (h, m, ch, cm, n, p, i) in sorted(
        sums.items(), key=lambda item: (-(item[1][1] + item[1][3]), str(item[0]))
    ):
        group = groups[key]
        surcharges = [*([p] if power else []), *([i] if idle else [])]
        use = m - sum(surcharges)
        row = [_label(ask, group), h + ch, use, *surcharges, cm, m + cm, share(m + cm, whole), n]
        table.rows.append(row)
        table.params.append(drill(ask, group))
    earlier = _before(ask.period)
    before = (
        booked(replace(ask, period=earlier))
        .filter(local_day__lte=earlier.last)
        .aggregate(h=part_sum("gpu_ms", earlier, default=0), m=part_sum("amount_micro", earlier, default=0))
    )
    corrections = sum(v[3] for v in sums.values())
    hours = sum(v[0] + v[2] for v in sums.values())
    return Answer(
        tables=[table],
        stats=[
            Stat(_("To be charged"), whole, MONEY, _("usage and corrections in these books"), before["m"]),
            Stat(
                _("of it corrections"), corrections, MONEY, _("booked in these months, also for earlier days")
            ),
            Stat(_("Hours"), hours, HOURS, _("corrections included"), before["h"]),
        ],
        chart=_chart(ask),
        before=earlier,
        definitions=[
            _("Whole months of the books that the period touches; what is still running is not booked yet."),
            _(
                "Cost: GPU-milliseconds × price per GPU-hour ÷ 3,600,000, rounded half up to 0.000001, once per line."
            ),
            _(
                "Power: the part of a line's cost at its price's surcharge for power, rounded in the same way."
            ),
            _(
                "Idle surcharge: idle GPU-hours × the surcharge that held when the day's use began, "
                "one line per lease and day, booked when its telemetry has settled."
            ),
            _("A correction of a closed month stands in the books of the month in which it was booked."),
            _("Totals are sums of these lines and nothing else."),
        ],
    )


def _before(period: Period) -> Period:
    """As many months before those that the period touches; while the last of them runs only up to the same part of
    the same day."""
    first, last = first_of_month(period.first), next_month(first_of_month(period.last))
    months = 12 * (last.year - first.year) + last.month - first.month
    start = 12 * first.year + first.month - 1 - months
    whole = Period("days", first, last - timedelta(days=1))
    end, part = first - timedelta(days=1), None
    if whole.so_far:
        today = local_day(now(), billing_zone())
        end, part = end.replace(day=min(end.day, today.day)), passed_of(today, now())
    return Period("days", date(start // 12, start % 12 + 1, 1), end, part)


def _columns(ask: Ask, *, power: bool, idle: bool) -> list[Column]:
    surcharges = []
    if power:
        surcharges.append(Column("power", pgettext("cost", "Power"), MONEY))
    if idle:
        surcharges.append(Column("idle", _("Idle surcharge"), MONEY))
    return [
        Column("group", group_word(ask.by)),
        Column("hours", _("GPU-hours"), HOURS),
        Column("usage", _("Usage"), MONEY),
        *surcharges,
        Column("corrections", _("Corrections"), MONEY),
        Column("charge", _("To be charged"), MONEY),
        Column("share", _("Share, %"), PERCENT),
        Column("lines", _("Lines"), COUNT),
    ]


def _label(ask: Ask, group: Group) -> str:
    if ask.by == "month" and isinstance(group.key, date):
        return f"{group.key:%Y-%m}"
    return label_of(group)


def _chart(ask: Ask) -> dict[str, object]:
    """Booked GPU-hours by day of use."""
    rows = dict(booked(ask).values_list("local_day").annotate(h=Sum("gpu_ms")))
    last = next_month(first_of_month(ask.period.last))
    days = [day for day in sorted(rows) if first_of_month(ask.period.first) <= day < last]
    return stacked(days, [(_("Booked"), "--series", [rows[day] for day in days])], _("GPU·h"))
