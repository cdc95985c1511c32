"""Many new rows of a table by COPY: a small part of what INSERT costs the process that writes them.

Triggers, constraints and foreign keys hold as for any insert. What a row does not name gets its field's default, as on
`save`; a time that defaults to now is that of the call. Inside a transaction only, which is left unusable where a row
fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any

from django.db import connection, models

PLAIN = (models.BooleanField, models.FloatField, models.ForeignKey, models.IntegerField)
"""Fields whose values the driver takes as they are."""


def rows_copy(rows: Iterable[models.Model]) -> int:
    """Write unsaved rows of one model, as `bulk_create` would; returns how many. Their ids are not read back."""
    waiting = list(rows)
    if not waiting:
        return 0
    model = type(waiting[0])
    names = _names(model)
    for row in waiting:
        row._prepare_related_fields_for_save(operation_name="bulk_create")  # type: ignore[attr-defined]
    return values_copy(model, names, map(attrgetter(*names), waiting))


def values_copy(model: type[models.Model], names: Sequence[str], rows: Iterable[Sequence[Any]]) -> int:
    """The same from bare values of the fields `names` (`flavour_id`, not `flavour`), one sequence a row.

    Without model instances, which cost more than all else of a row. A value is one of its field, or text as
    PostgreSQL reads it; of a JSON field it is plain data.
    """
    if not connection.in_atomic_block:
        raise RuntimeError("rows are copied inside the transaction of the change that they belong to")
    layout = _layout(model, tuple(names))
    table = connection.ops.quote_name(model._meta.db_table)
    constants = [make() for make in layout.constants]
    ready = list(
        rows
    )  # whole before the copy is open: a row that asks the database for something would wait for it
    # What the server finds wrong comes out where the copy ends, past the cursor that would make it Django's error.
    with (
        connection.wrap_database_errors,
        connection.cursor() as cursor,
        cursor.copy(f"COPY {table} ({layout.columns}) FROM STDIN") as copy,
    ):
        for row in ready:
            line = [*row, *constants]
            for place, convert in layout.converts:
                line[place] = convert(line[place])
            for make in layout.makers:
                line.append(make())
            copy.write_row(line)
    return len(ready)


def ids_take(model: type[models.Model], count: int) -> list[int]:
    """So many new ids of a table, ascending, for rows that are copied with theirs."""
    meta = model._meta
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT nextval(pg_get_serial_sequence(%s, %s)) FROM generate_series(1, %s)",
            [connection.ops.quote_name(meta.db_table), meta.pk.column, count],
        )
        return sorted(row[0] for row in cursor.fetchall())


@dataclass(frozen=True, slots=True)
class _Layout:
    """How rows of some fields are written: those columns, then what is the same for all, then what each row gets
    anew. ``converts``: by place, for values that the driver would not take as they are."""

    columns: str
    converts: Sequence[tuple[int, Callable[[Any], Any]]]
    constants: Sequence[Callable[[], Any]]
    makers: Sequence[Callable[[], Any]]


@cache
def _names(model: type[models.Model]) -> tuple[str, ...]:
    meta = model._meta
    return tuple(one.attname for one in meta.concrete_fields if one is not meta.auto_field)


@cache
def _layout(model: type[models.Model], names: tuple[str, ...]) -> _Layout:
    meta = model._meta
    by_name = {one.attname: one for one in meta.concrete_fields}
    named = [by_name[name] for name in names]
    constants: list[tuple[Any, Callable[[], Any]]] = []
    makers: list[tuple[Any, Callable[[], Any]]] = []
    for one in meta.concrete_fields:
        if one in named or one is meta.auto_field or (one.null and not one.has_default()):
            continue
        convert = _convert(one)
        make = one.get_default if convert is None else partial(_converted, one.get_default, convert)
        once = isinstance(one, models.DateField) or not callable(one.default)
        (constants if once else makers).append((one, make))
    columns = [*named, *(one for one, _ in constants), *(one for one, _ in makers)]
    return _Layout(
        ", ".join(connection.ops.quote_name(str(one.column)) for one in columns),
        [(place, convert) for place, one in enumerate(named) if (convert := _convert(one)) is not None],
        [make for _, make in constants],
        [make for _, make in makers],
    )


def _converted(make: Callable[[], Any], convert: Callable[[Any], Any]) -> Any:
    return convert(make())


def _convert(one: Any) -> Callable[[Any], Any] | None:
    """What makes a value of a field one that the driver takes; None where nothing needs be done."""
    if isinstance(one, models.JSONField):
        return partial(_json, one.encoder)
    if isinstance(one, models.CharField | models.TextField | models.UUIDField):
        return _text
    if isinstance(one, models.DateField):
        return _moment
    return None if isinstance(one, PLAIN) else partial(one.get_db_prep_save, connection=connection)


def _json(encoder: Any, value: Any) -> str | None:
    return None if value is None else json.dumps(value, cls=encoder)


def _text(value: Any) -> str | None:
    """Text itself; a choice or a translated text as its own words."""
    return value if value is None or type(value) is str else str(value)


def _moment(value: Any) -> str | None:
    return value if value is None or type(value) is str else value.isoformat()
