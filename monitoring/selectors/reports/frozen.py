"""A report as kept content: everything that page and files show, as it was, so that it never changes again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.utils import translation
from django.utils.formats import date_format
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from monitoring.selectors.reports.base import GROUP_WORDS, Answer, Ask, Kind
from monitoring.selectors.reports.period import Period
from portal.kernel.clock import now
from portal.kernel.tables import Table
from quotas.selectors.billing_time import billing_zone
from quotas.selectors.month_report import ledger_mark


@dataclass(frozen=True)
class Content:
    """What files are made of. `about` are the lines of a first sheet; `stats` label, raw value, kind, basis."""

    title: str
    period: str
    about: list[tuple[str, str]]
    stats: list[tuple[str, int | None, str, str]]
    parts: list[tuple[str, int, str]]
    tables: list[Table]
    chart: dict[str, Any] | None
    made_at: datetime
    language: str
    mark: int

    def as_json(self) -> dict[str, Any]:
        """For keeping."""
        return {
            "title": self.title,
            "period": self.period,
            "about": [list(row) for row in self.about],
            "stats": [list(row) for row in self.stats],
            "parts": [list(row) for row in self.parts],
            "tables": [table.as_json() for table in self.tables],
            "chart": self.chart,
            "made_at": self.made_at.isoformat(),
            "language": self.language,
            "mark": self.mark,
        }

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Content:
        """The inverse of `as_json`."""
        return cls(
            title=kept["title"],
            period=kept["period"],
            about=[(label, value) for label, value in kept["about"]],
            stats=[(label, value, kind, basis) for label, value, kind, basis in kept["stats"]],
            parts=[(label, value, tone) for label, value, tone in kept["parts"]],
            tables=[Table.from_json(table) for table in kept["tables"]],
            chart=kept["chart"],
            made_at=datetime.fromisoformat(kept["made_at"]),
            language=kept["language"],
            mark=kept["mark"],
        )


def content_of(kind: Kind, ask: Ask, answer: Answer, *, mark: int | None = None) -> Content:
    """Freeze an answer in the reader's language (the active one). `mark`: the ledger's, if it was read already."""
    mark = ledger_mark()[0] if mark is None else mark
    moment = now()
    return Content(
        title=str(kind.title),
        period=period_text(ask.period),
        about=about(kind, ask, answer, mark=mark, at=moment),
        stats=[(str(s.label), s.value, s.kind, str(s.basis)) for s in answer.stats],
        parts=[(str(p.label), p.value, p.tone) for p in answer.parts],
        tables=answer.tables,
        chart=answer.chart,
        made_at=moment,
        language=translation.get_language() or "en",
        mark=mark,
    )


def period_text(period: Period) -> str:
    """The period in words."""
    if period.is_month:
        return date_format(period.first, "YEAR_MONTH_FORMAT")
    time = f" {period.end.astimezone(billing_zone()):%H:%M}" if period.part is not None else ""
    return f"{period.first:%Y-%m-%d} – {period.last:%Y-%m-%d}{time}"


def about(kind: Kind, ask: Ask, answer: Answer, *, mark: int, at: datetime) -> list[tuple[str, str]]:
    """Filter, zone, currency, times, definitions: what stands on a file's first sheet."""
    zone = billing_zone()
    rows = [
        (_("Report"), str(kind.title)),
        (_("Period"), period_text(ask.period)),
        (_("From"), f"{ask.period.start.astimezone(zone):%Y-%m-%d %H:%M %z}"),
        (_("To, not included"), f"{ask.period.end.astimezone(zone):%Y-%m-%d %H:%M %z}"),
        (_("Grouped by"), str(GROUP_WORDS[ask.by])),
        (_("Filter"), filter_text(ask)),
        (_("Billing time zone"), zone.key),
        (_("Currency"), str(settings.GPUPOOL_CURRENCY)),
        (pgettext("export", "Written"), f"{at.astimezone(zone):%Y-%m-%d %H:%M:%S %z}"),
        (_("Ledger to entry"), str(mark)),
    ]
    if answer.until is not None:
        rows.append((_("Hours summed up to"), f"{answer.until.astimezone(zone):%Y-%m-%d %H:%M %z}"))
    if answer.covered is not None and answer.covered[1]:
        rows.append((_("Coverage"), coverage_text(answer.covered)))
    return [*rows, *((_("Definition"), str(text)) for text in answer.definitions)]


def coverage_text(covered: tuple[int, int]) -> str:
    """Share of the allocated time that had telemetry, rounded down, so that 100 % means all of it."""
    seen, whole = covered
    return _("%(share)s %% of allocated time has telemetry") % {"share": f"{1000 * seen // whole / 10:.1f}"}


def filter_text(ask: Ask) -> str:
    """What was chosen, in words."""
    chosen = ask.chosen
    parts = []
    if chosen.department_id is not None:
        parts.append(ask.policy.tree.path(chosen.department_id))
    if chosen.flavour is not None:
        parts.append(chosen.flavour.name)
    if chosen.user is not None:
        parts.append(chosen.user.get_full_name())
    if chosen.site:
        parts.append(_("Site %(site)s") % {"site": chosen.site})
    return "; ".join(parts) or _("all that you may see")
