"""How the main table of a report is shown: its order and its columns, both in the address. Files have all columns."""

from __future__ import annotations

from collections.abc import Mapping

from portal.kernel.tables import TEXT, Table
from quotas.web.money.look import LOOK, Head, Look

__all__ = ["LOOK", "Look", "heads_of", "look_of", "shown_table"]


def heads_of(table: Table) -> list[Head]:
    """The columns of a table as a page offers them."""
    return [Head(column.key, column.label, numeric=column.kind != TEXT) for column in table.columns]


def look_of(params: Mapping[str, str], table: Table) -> Look:
    """From a query string. Invalid for a column that the table does not have, or for hiding the first."""
    return Look.of(params, heads_of(table))


def shown_table(look: Look, table: Table) -> Table:
    """The table in this order with these columns; rows without a value come last. Totals are those of all rows."""
    values = {
        column.key: (lambda row, place=place: row[0][place]) for place, column in enumerate(table.columns)
    }
    linked = look.ordered(table.linked, values)
    places = [i for i, column in enumerate(table.columns) if column.key not in look.hide]
    return Table(
        table.title,
        [table.columns[i] for i in places],
        [[row[i] for i in places] for row, _params in linked],
        [params for _row, params in linked],
    )
