"""How the main table of a report is shown: its order and its columns, both in the address. Files have all columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.http import QueryDict
from django.utils.translation import gettext as _

from monitoring.services.report_runs import LOOK
from portal.kernel.errors import Invalid
from portal.kernel.tables import Table

__all__ = ["LOOK", "Look"]


@dataclass(frozen=True)
class Look:
    """`sort`: a column's key, with - before it from large to small, "" as the report has it. `hide`: keys."""

    sort: str
    hide: tuple[str, ...]

    @classmethod
    def read(cls, params: Mapping[str, str], table: Table) -> Look:
        """From a query string. Invalid for a column that the table does not have, or for hiding the first."""
        keys = [column.key for column in table.columns]
        sort = params.get("sort", "")
        if sort and sort.removeprefix("-") not in keys:
            raise Invalid.field("sort", _("This table has no such column."))
        hide = tuple(key for key in params.get("hide", "").split(",") if key)
        if any(key not in keys[1:] for key in hide):
            raise Invalid.field("hide", _("This table has no such column."))
        return cls(sort, hide)

    def params(self) -> dict[str, str]:
        """As a query string has it, without what is empty."""
        found = {"sort": self.sort, "hide": ",".join(self.hide)}
        return {name: value for name, value in found.items() if value}

    def table(self, table: Table) -> Table:
        """The table in this order with these columns; rows without a value come last. Totals are those of all rows."""
        linked = table.linked
        if self.sort:
            place = table.column(self.sort.removeprefix("-"))
            filled = [row for row in linked if row[0][place] is not None]
            filled.sort(key=lambda row: row[0][place], reverse=self.sort.startswith("-"))
            linked = filled + [row for row in linked if row[0][place] is None]
        places = [i for i, column in enumerate(table.columns) if column.key not in self.hide]
        return Table(
            table.title,
            [table.columns[i] for i in places],
            [[row[i] for i in places] for row, _params in linked],
            [params for _row, params in linked],
        )

    def choices(self, table: Table, query: QueryDict) -> list[dict[str, Any]]:
        """Every column but the first: its words, whether it is shown, and the address that turns it over."""
        out = []
        for column in table.columns[1:]:
            other = [key for key in self.hide if key != column.key]
            if column.key not in self.hide:
                other.append(column.key)
            turned = query.copy()
            turned.pop("page", None)
            turned.pop("hide", None)
            if other:
                turned["hide"] = ",".join(other)
            out.append(
                {
                    "label": column.label,
                    "shown": column.key not in self.hide,
                    "url": f"?{turned.urlencode()}",
                }
            )
        return out
