"""The finance home: will the month hold, what moved, what must be decided."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from portal.accounts.middleware import policy_of_request
from portal.accounts.models import Role
from portal.kernel.clock import now
from portal.kernel.units import MICRO
from quotas.selectors.billing_time import billing_zone, month_of, next_month, previous_month
from quotas.selectors.budgets import budget_states, seen_budgets
from quotas.selectors.finance_home import Forecast, decisions, forecast
from quotas.selectors.money import LineFilter, book_months
from quotas.selectors.month_report import MonthReport, month_report
from quotas.selectors.running import one_look
from quotas.templatetags.money_tags import month_name
from quotas.web.money.common import MONEY_ROLES, day_links, for_roles
from quotas.web.money.look import Head, Look, remembered
from quotas.web.money.month import VALUES


def home_heads() -> list[Head]:
    """The columns of the table of departments."""
    currency = str(settings.GPUPOOL_CURRENCY)
    return [
        Head("group", _("Department"), numeric=False),
        Head("hours", _("Allocated"), unit=_("GPU·h")),
        Head("cost", _("So far"), unit=currency),
        Head("share", _("Share"), numeric=False),
        Head("earlier", _("Same days before"), unit=currency),
        Head("before", _("Difference")),
    ]


@for_roles(*MONEY_ROLES, Role.LEAD)
@require_safe
@remembered("finance")
@one_look()
def finance_home(request: HttpRequest) -> HttpResponse:
    """``/finance/``."""
    policy = policy_of_request(request)
    present = month_of(now())
    report = month_report(policy, LineFilter(month=present), "department")
    months = book_months()
    waiting = decisions(policy, months)
    outlook = forecast(report)
    movers = sorted(
        (g for g in report.groups if g.before_micro is not None),
        key=lambda g: -abs(g.total.amount_micro - (g.before_micro or 0)),
    )
    figure = chart(report, outlook)
    day_links(figure, [day.day for day in report.days], report.days, {"month": f"{present:%Y-%m}"})
    heads = home_heads()
    look = Look.of(request.GET.dict(), heads)
    context = {
        "report": report,
        "groups": look.ordered(report.groups, {**VALUES, "earlier": lambda group: group.before_micro}),
        "heads": look.shown(heads),
        "hide": look.hide,
        "columns": look.choices(heads, request.GET),
        "month": present,
        "last_month": previous_month(present),
        "last_closed": any(m.closed for m in months if m.month == previous_month(present)),
        "share": round(100 * ((report.until - report.start) / (report.end - report.start)), 1),
        "decisions": waiting,
        "forecast": outlook,
        "figure": figure,
        "movers": [(g, g.total.amount_micro - (g.before_micro or 0)) for g in movers[:5]],
        "budgets": sorted(
            budget_states(list(seen_budgets(policy, present)), policy.tree),
            key=lambda b: (-b.worst.percent, b.path),
        )[:6],
        "zone": billing_zone().key,
        "may_close": policy.keeps_books,
    }
    return render(request, "quotas/money/finance_home.html", context)


def chart(report: MonthReport, outlook: Forecast | None) -> dict[str, Any]:
    """Cost of each day so far, of each day to come by the forecast, and of the month before as a line."""
    month = report.days[0]
    length = (next_month(month) - month).days
    daily = {d.day: report.money_of(d) for d in report.days}
    before = {d.day: micro for d, micro in report.before_by_day.items()}
    each = None
    rest = [n for n in range(1, length + 1) if n not in daily]
    if outlook is not None and rest:
        each = ((outlook.low_micro + outlook.high_micro) // 2 - report.total.amount_micro) // len(rest)
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": _("so far"),
            "x": list(daily),
            "y": [round(v / MICRO, 2) for v in daily.values()],
            "marker": {"color": "--series"},
        }
    ]
    if each is not None:
        data.append(
            {
                "type": "bar",
                "name": _("forecast"),
                "x": rest,
                "y": [round(each / MICRO, 2)] * len(rest),
                "marker": {"color": "--accent-soft", "line": {"color": "--accent", "width": 1}},
            }
        )
    if before:
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": month_name(previous_month(month)),
                "x": list(range(1, length + 1)),
                "y": [round(before[n] / MICRO, 2) if n in before else None for n in range(1, length + 1)],
                "line": {"color": "--ink-3", "width": 1.5, "dash": "dot"},
            }
        )
    rows = [
        [n, *(f"{v / MICRO:,.2f}" if v is not None else "" for v in (daily.get(n), before.get(n)))]
        + [f"{each / MICRO:,.2f}" if each is not None and n in rest else ""]
        for n in range(1, length + 1)
    ]
    head = [_("Day"), month_name(month), month_name(previous_month(month)), _("forecast")]
    return {
        "data": data if report.total.lines or before else [],
        "layout": {
            "barmode": "overlay",
            "bargap": 0.2,
            "xaxis": {"range": [0.4, length + 0.6], "dtick": 5, "tick0": 0, "tickangle": 0},
            "showlegend": len(data) > 1,
        },
        "table": {"head": head, "rows": rows},
    }
