"""The finance home: will the month hold, what moved, what must be decided."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from portal.accounts.models import Role
from portal.kernel.clock import now
from portal.kernel.units import MICRO
from quotas.selectors.billing_time import billing_zone, month_of, previous_month
from quotas.selectors.finance_home import Forecast, decisions, forecast
from quotas.selectors.money import LineFilter, book_months
from quotas.selectors.month_report import MonthReport, month_report
from quotas.templatetags.money_tags import month_name
from quotas.web.money.common import MONEY_ROLES, for_roles, policy_of_request


@for_roles(*MONEY_ROLES, Role.LEAD)
@require_safe
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
    context = {
        "report": report,
        "month": present,
        "last_month": previous_month(present),
        "last_closed": any(m.closed for m in months if m.month == previous_month(present)),
        "share": round(100 * ((report.until - report.start) / (report.end - report.start)), 1),
        "decisions": waiting,
        "forecast": outlook,
        "figure": chart(report, outlook),
        "movers": [(g, g.total.amount_micro - (g.before_micro or 0)) for g in movers[:5]],
        "zone": billing_zone().key,
        "may_close": policy.keeps_books,
    }
    return render(request, "quotas/money/finance_home.html", context)


def chart(report: MonthReport, outlook: Forecast | None) -> dict[str, Any]:
    """Cost of each day so far, and of each day to come by the forecast."""
    days = report.days
    daily = [sum(by_day[d].amount_micro for by_day in report.by_day.values() if d in by_day) for d in days]
    last = (report.end.astimezone(billing_zone())).date()
    rest = []
    day = days[-1]
    while (day := day.fromordinal(day.toordinal() + 1)) < last:
        rest.append(day)
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": _("so far"),
            "x": [f"{d:%Y-%m-%d}" for d in days],
            "y": [round(v / MICRO, 2) for v in daily],
            "marker": {"color": "--series"},
        }
    ]
    rows = [[f"{d:%Y-%m-%d}", f"{v / MICRO:,.2f}", ""] for d, v in zip(days, daily, strict=True)]
    if outlook is not None and rest:
        middle = (outlook.low_micro + outlook.high_micro) / 2 - report.total.amount_micro
        each = round(middle / (len(rest) + 1e-9) / MICRO, 2)
        data.append(
            {
                "type": "bar",
                "name": _("forecast"),
                "x": [f"{d:%Y-%m-%d}" for d in rest],
                "y": [each for _d in rest],
                "marker": {
                    "color": "--accent-soft",
                    "line": {"color": "--accent", "width": 1},
                    "pattern": {"shape": "/", "fgcolor": "--accent", "size": 5, "solidity": 0.15},
                },
            }
        )
        rows += [[f"{d:%Y-%m-%d}", "", f"{each:,.2f}"] for d in rest]
    return {
        "data": data if report.total.lines else [],
        "layout": {
            "barmode": "overlay",
            "bargap": 0.2,
            "yaxis": {"title": {"text": _("Cost a day")}},
            "xaxis": {"type": "category", "nticks": 8},
            "showlegend": len(data) > 1,
        },
        "table": {"head": [_("Day"), month_name(report.days[0]), _("forecast")], "rows": rows},
    }
