"""Several GPUs beside one another: one measure, one line a card, with its table twin and a file."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from monitoring.selectors import access, series
from monitoring.selectors.series import Point, Span
from monitoring.web import figures
from pool.models import Gpu
from portal.accounts.middleware import policy_of_request
from portal.accounts.policy import Policy
from portal.kernel.clock import now
from portal.kernel.csv_export import csv_response, people_csv
from portal.kernel.errors import Invalid

MOST = 8
KNOWN = frozenset({"gpu", "node", "add", "measure", "span"})


def _measures() -> dict[str, tuple[str, str, figures.Getter]]:
    busy, memory, temperature, power = figures.lines()
    return {
        "busy": busy[:3],
        "sm": (_("SM activity"), "%", lambda p: p.sm),
        "mem": memory[:3],
        "temp": temperature[:3],
        "power": power[:3],
    }


def _cards(request: HttpRequest, policy: Policy) -> list[Gpu]:
    """The cards asked for: `gpu` (uid, several), all of a `node`, and one to `add` by its name; at most eight."""
    unknown = sorted(set(request.GET) - KNOWN)
    if unknown:
        raise Invalid.field(unknown[0], _("This filter is not known here."))
    found: dict[int, Gpu] = {}
    rows = Gpu.objects.select_related("node").exclude(condition=Gpu.Condition.RETIRED)
    try:
        wanted = [UUID(text) for text in request.GET.getlist("gpu")[:MOST]]
        node = UUID(request.GET["node"]) if request.GET.get("node") else None
    except ValueError as error:
        raise Invalid.field("gpu", _("This is no uid.")) from error
    by_uid = {card.uid: card for card in rows.filter(uid__in=wanted)} if wanted else {}
    for uid in wanted:
        if uid in by_uid:
            found[by_uid[uid].pk] = by_uid[uid]
    if node is not None:
        access.node_for(policy, node)
        for card in rows.filter(node__uid=node).order_by("index", "id"):
            found[card.pk] = card
    name, _slash, index = request.GET.get("add", "").strip().rpartition("/")
    if name and index.isdecimal():
        for card in rows.filter(node__name=name, index=int(index[:4])):
            found[card.pk] = card
    return list(found.values())[:MOST]


def _asked(request: HttpRequest) -> tuple[str, Span]:
    measure = request.GET.get("measure", "busy")
    return (
        measure if measure in _measures() else "busy",
        series.SPANS.get(request.GET.get("span", ""), series.SPANS["24h"]),
    )


def _lines(cards: list[Gpu], span: Span) -> tuple[dict[int, list[Point]], Any, Any]:
    end = now()
    start = series.span_start(span, end)
    keys = [(card.pk, 0) for card in cards]
    found = series.charts(keys, start=start, end=end, step=span.step, point_s=span.point_s)
    return {card.pk: found[card.pk, 0] for card in cards}, start, end


def label_of(card: Gpu) -> str:
    """How a card is named in the chart and the file."""
    return f"{card.node.name}/{card.index}"


def _table(
    cards: list[Gpu], lines: dict[int, list[Point]], measure: str
) -> tuple[list[str], list[list[Any]]]:
    """Head and rows by time, oldest first; None where a card has no value then."""
    title, unit, getter = _measures()[measure]
    by_time: dict[Any, dict[int, Any]] = {}
    for pk, points in lines.items():
        for point in points:
            value = getter(point)
            by_time.setdefault(point.at, {})[pk] = None if value is None else round(value, 1)
    head = [_("From"), *(f"{label_of(card)}, {unit}" for card in cards)]
    rows = [
        [figures.iso(at), *(values.get(card.pk) for card in cards)] for at, values in sorted(by_time.items())
    ]
    return head, rows


def _figure(cards: list[Gpu], span: Span, measure: str) -> dict[str, Any]:
    lines, start, end = _lines(cards, span)
    _title, unit, getter = _measures()[measure]
    data = []
    for card in cards:
        xs, holes = figures.with_holes(lines[card.pk])
        ys = [None if i is None else getter(lines[card.pk][i]) for i in holes]
        if ys:
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": label_of(card),
                    "x": xs,
                    "y": ys,
                    "connectgaps": False,
                }
            )
    head, rows = _table(cards, lines, measure)
    y: dict[str, Any] = {"title": {"text": unit}}
    if unit == "%":
        y["range"] = [0, 100]
    return {
        "data": data,
        "layout": {
            "xaxis": {"type": "date", "range": [figures.iso(start), figures.iso(end)]},
            "yaxis": y,
            "showlegend": True,
        },
        "table": {"head": head, "rows": [[_("N/A") if v is None else v for v in row] for row in rows[::-1]]},
    }


@login_required
@require_safe
def compare(request: HttpRequest) -> HttpResponse:
    """``/gpus/compare/?gpu=…&gpu=…``: up to eight cards, one measure."""
    policy = policy_of_request(request)
    cards = _cards(request, policy)
    measure, span = _asked(request)
    chosen = [("gpu", str(card.uid)) for card in cards]

    def address(**changes: str) -> str:
        values = {"measure": measure, "span": span.code, **changes}
        return "?" + urlencode([*chosen, *values.items()])

    spans = {"1h": _("1 h"), "24h": _("24 h"), "7d": _("7 d"), "30d": _("30 d"), "1y": _("1 y")}
    context = {
        "cards": [
            {
                "card": card,
                "label": label_of(card),
                "without": "?"
                + urlencode(
                    [*(c for c in chosen if c[1] != str(card.uid)), ("measure", measure), ("span", span.code)]
                ),
            }
            for card in cards
        ],
        "chosen": chosen,
        "measure": measure,
        "span": span,
        "title": _measures()[measure][0],
        "measures": [
            {"url": address(measure=code), "label": found[0], "current": code == measure}
            for code, found in _measures().items()
        ],
        "spans": [
            {"url": address(span=code), "label": label, "current": code == span.code}
            for code, label in spans.items()
        ],
        "file": address(),
        "figure": _figure(cards, span, measure) if cards else None,
        "full": len(cards) >= MOST,
        "missed": request.GET.get("add", "")
        if request.GET.get("add") and not _was_added(request, cards)
        else "",
    }
    return render(request, "monitoring/compare.html", context)


def _was_added(request: HttpRequest, cards: list[Gpu]) -> bool:
    return any(label_of(card) == request.GET.get("add", "").strip() for card in cards)


@login_required
@require_safe
def compare_file(request: HttpRequest) -> HttpResponse:
    """The same figures as CSV for people."""
    cards = _cards(request, policy_of_request(request))
    measure, span = _asked(request)
    lines, start, end = _lines(cards, span)
    head, rows = _table(cards, lines, measure)
    title, unit, _getter = _measures()[measure]
    about = [
        (_("Measure"), f"{title}, {unit}"),
        (_("Period"), f"{figures.iso(start)} – {figures.iso(end)}"),
        (_("Zone"), "UTC"),
        (_("Definition"), _("Means over the samples that had the measure; empty where none had.")),
    ]
    return csv_response(f"gpus-{measure}-{span.code}.csv", people_csv(about=about, columns=head, rows=rows))
