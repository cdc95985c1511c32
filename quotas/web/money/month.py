"""The month page: where hours and money went, by department, flavour, person or site, down to the lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from portal.accounts.middleware import policy_of_request
from portal.kernel.clock import now
from portal.kernel.csv_export import csv_response, machine_csv, people_csv
from portal.kernel.errors import Invalid
from portal.kernel.units import MICRO, MS_PER_HOUR
from quotas.selectors import line_rows as files
from quotas.selectors.billing_time import billing_zone, month_of
from quotas.selectors.money import Lines, book_state
from quotas.selectors.month_report import (
    GROUPINGS,
    OTHERS,
    SERIES,
    Group,
    MonthReport,
    ledger_mark,
    month_report,
    name_users,
)
from quotas.selectors.running import one_look
from quotas.web.money.common import DEFINITIONS, about, day_links, filter_chips, lines_of, signed_in, too_many
from quotas.web.money.look import Head, Look, remembered


def grouping(request: HttpRequest) -> str:
    """`?by=` or what suits: departments, and people once there is one department only."""
    by = request.GET.get("by", "department")
    if by not in GROUPINGS:
        raise Invalid.field("by", _("Known groupings: department, flavour, user, site."))
    return by


VALUES: dict[str, Callable[[Group], Any]] = {
    "group": lambda group: group.label,
    "hours": lambda group: group.total.gpu_ms,
    "cost": lambda group: group.total.amount_micro,
    "share": lambda group: group.total.amount_micro,
    "before": lambda group: group.change_percent,
    "lines": lambda group: group.total.lines,
}


def month_heads(group: Any) -> list[Head]:
    """The columns of the table of groups."""
    return [
        Head("group", group, numeric=False),
        Head("hours", _("Allocated"), unit=_("GPU·h")),
        Head("cost", _("Cost"), unit=str(settings.GPUPOOL_CURRENCY)),
        Head("share", _("Share of cost"), numeric=False),
        Head("before", _("Against before")),
        Head("lines", _("Lines")),
    ]


@signed_in
@require_safe
@remembered("month")
@one_look()
def month(request: HttpRequest) -> HttpResponse:
    """``/months/?month=2026-05&by=department``."""
    policy = policy_of_request(request)
    lines = lines_of(request, month=month_of(now()))
    by = grouping(request)
    words = {"department": _("Department"), "flavour": _("Flavour"), "user": _("Person"), "site": _("Site")}
    heads = month_heads(words[by])
    look = Look.of(request.GET.dict(), heads)
    report = month_report(policy, lines.filter, by, named=look.sort.removeprefix("-") == "group")
    page = Paginator(look.ordered(report.groups, VALUES), 50).get_page(request.GET.get("page"))
    if by == "user":
        name_users([*report.groups[:SERIES], *page])
    books = book_state()
    months = books.months
    figure = chart(report)
    shown = {**request.GET.dict(), "month": f"{lines.filter.month:%Y-%m}"}
    day_links(figure, _axis(report), report.days, shown)
    context = {
        "report": report,
        "by": by,
        "by_options": list(words.items()),
        "heads": look.shown(heads),
        "hide": look.hide,
        "columns": look.choices(heads, request.GET),
        "months": months,
        "closed": any(m.closed for m in months if m.month == report.filter.month),
        "chips": filter_chips(report.filter, policy),
        "figure": figure,
        "definitions": DEFINITIONS,
        "zone": billing_zone().key,
        "mark": books.mark,
        "marked_at": books.marked_at,
        "only_own": not policy.reads_money,
        "may_close": policy.keeps_books,
        "page": page,
    }
    return render(request, "quotas/money/month.html", context)


@signed_in
@require_safe
@one_look()
def month_file(request: HttpRequest) -> HttpResponse:
    """``/months/file/?for=people|machines&rows=groups|lines`` with the page's filter."""
    policy = policy_of_request(request)
    lines = lines_of(request, month=month_of(now()))
    chosen = lines.filter
    assert chosen.month is not None
    of_groups = request.GET.get("rows") == "groups" and request.GET.get("for") != "machines"
    if not of_groups and (moved := too_many(request, lines)):
        return moved
    name = f"gpu-cost-{chosen.month:%Y-%m}"
    if request.GET.get("for") == "machines":
        chunks = machine_csv(columns=files.MACHINE_COLUMNS, rows=files.machine_rows(lines.all()))
        return csv_response(f"{name}.csv", chunks)
    head = about(chosen, policy, mark=ledger_mark()[0])
    if of_groups:
        report = month_report(policy, chosen, grouping(request))
        columns = [
            _("Group"),
            _("GPU·h"),
            _("GPU-milliseconds"),
            _("Cost"),
            _("Lines"),
            _("Cost of the month before"),
        ]
        chunks = people_csv(about=head, columns=columns, rows=files.group_rows(report))
        return csv_response(f"{name}-{report.by}.csv", chunks)
    chunks = people_csv(about=head, columns=files.people_columns(), rows=files.people_rows(lines.all()))
    return csv_response(f"{name}-lines.csv", chunks)


def _axis(report: MonthReport) -> list[str]:
    return [f"{day:%m-%d}" for day in report.days]


def chart(report: MonthReport) -> dict[str, Any]:
    """Allocated GPU-hours by day, stacked by group, with the same figures as a table."""
    shown, rest = report.groups[:SERIES], report.groups[SERIES:]
    days = _axis(report)

    def hours(keys: list[Any]) -> list[float]:
        return [
            round(sum(report.by_day[k][d].gpu_ms for k in keys if k in report.by_day) / MS_PER_HOUR, 1)
            for d in report.days
        ]

    series = [(g.label, hours([g.key])) for g in shown]
    if rest or OTHERS in report.by_day:
        series.append((_("others"), hours([*(g.key for g in rest), OTHERS])))
    totals = [
        sum(by_day[d].amount_micro for by_day in report.by_day.values() if d in by_day) for d in report.days
    ]
    gpu = [sum(by_day[d].gpu_ms for by_day in report.by_day.values() if d in by_day) for d in report.days]
    return {
        "data": [
            {"type": "bar", "name": label, "x": days, "y": values, "marker": {"color": f"--cat-{min(i, 8)}"}}
            for i, (label, values) in enumerate(series, start=1)
        ]
        if report.total.lines
        else [],
        "layout": {
            "barmode": "stack",
            "bargap": 0.15,
            # a young month keeps the width of a whole one, so that its bars do not fill the plot
            "xaxis": {
                "type": "category",
                "nticks": 6,
                "tickangle": 0,
                "range": [-0.6, max(len(days), 28) - 0.4],
            },
            "showlegend": True,
        },
        "table": {
            "head": [_("Day"), *(label for label, _values in series), _("All, GPU·h"), _("All, cost")],
            "rows": [
                [
                    f"{day:%Y-%m-%d}",
                    *(f"{values[i]:,.1f}" for _label, values in series),
                    f"{gpu[i] / MS_PER_HOUR:,.1f}",
                    f"{totals[i] / MICRO:,.2f}",
                ]
                for i, day in enumerate(report.days)
            ],
        },
    }


__all__ = ["Lines", "chart", "month", "month_file"]
