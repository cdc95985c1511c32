"""A report's content as files. Everything comes from the content alone, so that a kept one gives the same bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from unicodedata import east_asian_width

from django.http import HttpResponse
from django.template.loader import render_to_string
from django.utils import translation
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from monitoring.selectors.reports.frozen import Content
from monitoring.web.report_figures import shown
from portal.kernel import tables
from portal.kernel.csv_export import csv_response, machine_csv, people_csv
from portal.kernel.errors import Conflict, Invalid
from portal.kernel.xlsx_export import xlsx_bytes

XLSX = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"


def file_of(content: Content, form: str, name: str) -> HttpResponse:
    """`people` and `machines` are CSV, `xlsx` and `pdf`. Invalid for another form."""
    makers: dict[str, Callable[[Content, str], HttpResponse]] = {
        "people": _people,
        "machines": _machines,
        "xlsx": _xlsx,
        "pdf": _pdf,
    }
    if form not in makers:
        raise Invalid.field("format", _("Known files: people, machines, xlsx, pdf."))
    with translation.override(content.language):
        return makers[form](content, re.sub(r"[^A-Za-z0-9._-]+", "-", name))


def _people(content: Content, name: str) -> HttpResponse:
    table = content.tables[0]
    chunks = people_csv(
        about=content.about,
        columns=tables.people_columns(table, _("GPU-milliseconds")),
        rows=tables.people_rows(table, _("Total")),
    )
    return csv_response(f"{name}.csv", chunks)


def _machines(content: Content, name: str) -> HttpResponse:
    table = content.tables[0]
    return csv_response(f"{name}.csv", machine_csv(columns=tables.machine_columns(table), rows=table.rows))


def _xlsx(content: Content, name: str) -> HttpResponse:
    data = xlsx_bytes(about=content.about, found=content.tables, made_at=content.made_at, words=sheet_words())
    return _download(data, f"{name}.xlsx", XLSX)


def sheet_words() -> dict[str, str]:
    """The words of a workbook in the active language."""
    return {
        "about": pgettext("sheet", "About"),
        "total": _("Total"),
        "milliseconds": _("GPU-milliseconds"),
    }


def pdf_bytes(content: Content) -> bytes:
    """A printable report: cover, definitions, figures, a chart, tables, lines to sign, page numbers.

    Conflict (`pdf_unavailable`) where the libraries that draw text (Pango) are missing on this machine.
    """
    try:
        from weasyprint import HTML
    except (ImportError, OSError) as error:
        raise Conflict(
            code="pdf_unavailable",
            detail=_(
                "This installation cannot draw PDF files: the Pango library is missing. CSV and XLSX work."
            ),
        ) from error
    with translation.override(content.language):
        tables = [(table, widths(table)) for table in content.tables]
        context = {"content": content, "tables": tables, "bars": bars(content)}
        html = render_to_string("monitoring/reports/print.html", context)
    digest = hashlib.sha256(html.encode()).digest()[:16]
    data: bytes = HTML(string=html, url_fetcher=_no_fetch).write_pdf(pdf_identifier=digest)
    return data


def widths(table: tables.Table) -> list[str]:
    """How broad each column of a printed table is, in percent: by its longest text. Widths that are given spare the
    printer to measure every cell again for each page.
    """
    needs = []
    for place, column in enumerate(table.columns):
        texts = {
            shown(row[place], column.kind) for row in (*table.rows, table.total()) if row[place] is not None
        }
        longest = max((_breadth(text) for text in texts), default=0)
        words = max((_breadth(word) for word in column.label.split()), default=0)
        needs.append(min(max(longest, words, _breadth(column.label) // 2, 6), 60) + 3)
    whole = sum(needs)
    return [f"{100 * need / whole:.2f}" for need in needs]


def _breadth(text: str) -> int:
    """In halves of a Chinese character."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def _no_fetch(url: str, *_args: object, **_more: object) -> dict[str, object]:
    raise ValueError(f"a printed report loads nothing: {url[:80]}")


def bars(content: Content) -> list[dict[str, object]]:
    """The chart as plain bars: for each day its parts in percent of the largest day."""
    figure = content.chart or {}
    traces = figure.get("data") or []
    if not traces:
        return []
    days = traces[0]["x"]
    sums = [sum(trace["y"][i] for trace in traces) for i in range(len(days))]
    top = max(sums, default=0)
    if top <= 0:
        return []
    return [
        {
            "day": day,
            "parts": [
                {"tone": n, "share": f"{100 * trace['y'][i] / top:.2f}"}
                for n, trace in enumerate(traces)
                if trace["y"][i] > 0
            ],
        }
        for i, day in enumerate(days)
    ]


def _pdf(content: Content, name: str) -> HttpResponse:
    return _download(pdf_bytes(content), f"{name}.pdf", "application/pdf")


def _download(data: bytes, name: str, kind: str) -> HttpResponse:
    response = HttpResponse(data, content_type=kind)
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response
