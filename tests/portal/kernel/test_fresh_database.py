"""An empty database made in one step is the one that the migrations make one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import psycopg
import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connection, connections, migrations
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader

from portal.kernel import fresh_database
from tests.database import database_url

# What pg_catalog says of everything that migrations can make; extensions' own things are left out.
CATALOGUE = {
    "columns": """
        SELECT c.relname, c.relkind, row_number() OVER (PARTITION BY c.oid ORDER BY a.attnum), a.attname,
               format_type(a.atttypid, a.atttypmod), a.attnotnull,
               a.attidentity, a.attcollation::regcollation::text, pg_get_expr(d.adbin, d.adrelid)
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relnamespace = 'public'::regnamespace AND a.attnum > 0
        AND NOT a.attisdropped AND c.relkind IN ('r', 'p', 'v')""",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace""",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    "triggers": "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal",
    "functions": """
        SELECT p.proname, pg_get_functiondef(p.oid) FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
        WHERE p.pronamespace = 'public'::regnamespace AND l.lanname IN ('plpgsql', 'sql')
        AND NOT EXISTS (SELECT 1 FROM pg_depend WHERE objid = p.oid AND deptype = 'e')""",
    "extensions": "SELECT extname FROM pg_extension",
    "migrations": "SELECT app, name FROM django_migrations",
    "permissions": """
        SELECT t.app_label, t.model, p.codename, p.name FROM auth_permission p
        JOIN django_content_type t ON t.id = p.content_type_id""",
}


@pytest.fixture
def unguarded(django_db_blocker: Any) -> Iterator[None]:
    """Databases of one's own: the tests' guard knows only the one that it made."""
    with django_db_blocker.unblock():
        yield


@contextmanager
def server() -> Iterator[psycopg.Connection[Any]]:
    """The tests' database server, outside any database of ours."""
    with psycopg.connect(database_url("postgres"), autocommit=True) as opened:
        yield opened


@contextmanager
def empty_database(name: str) -> Iterator[BaseDatabaseWrapper]:
    """A database of its own on the tests' server, reachable under `name`, dropped afterwards."""
    full = f"{connection.settings_dict['NAME']}_{name}"
    with server() as opened:
        opened.execute(f'DROP DATABASE IF EXISTS "{full}"')
        opened.execute(f'CREATE DATABASE "{full}"')
    connections.settings[name] = {**connection.settings_dict, "NAME": full}
    try:
        yield connections[name]
    finally:
        connections[name].close()
        if pool := getattr(connections[name], "pool", None):
            pool.close()
        del connections[name], connections.settings[name]
        with server() as opened:
            opened.execute(f'DROP DATABASE "{full}"')


def described(database: BaseDatabaseWrapper) -> dict[str, list[Any]]:
    with database.cursor() as cursor:
        found = {}
        for what, sql in CATALOGUE.items():
            cursor.execute(sql)
            found[what] = sorted(cursor.fetchall(), key=repr)
        cursor.execute(
            "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        )
        tables = sorted(name for (name,) in cursor.fetchall())
        counts = []
        for table in tables:
            cursor.execute(f'SELECT count(*) FROM "{table}"')
            counts.append((table, cursor.fetchone()[0]))
        return {**found, "rows": counts}


@pytest.mark.usefixtures("unguarded")
def test_one_step_makes_what_the_migrations_make() -> None:
    with empty_database("fresh") as fresh, empty_database("stepwise") as stepwise:
        assert fresh_database.make(fresh), (
            "some migration is not known to the one step: a first start takes long"
        )
        with mock.patch.object(fresh_database, "is_empty", return_value=False):
            call_command("migrate", database="stepwise", verbosity=0, interactive=False)
        at_once, step_by_step = described(fresh), described(stepwise)
        assert len(at_once["constraints"]) > 200
        assert ("quotas_ledgerentry_insert_only",) in [row[:1] for row in at_once["triggers"]]
        for what, rows in step_by_step.items():
            assert at_once[what] == rows, what


@pytest.mark.usefixtures("unguarded")
def test_a_migration_that_the_end_state_does_not_tell_is_not_skipped() -> None:
    known = migrations.Migration("nothing", "pool")
    known.operations = [migrations.RunSQL("SELECT 1")]
    moved = migrations.Migration("moved", "pool")
    moved.operations = [
        migrations.SeparateDatabaseAndState(state_operations=[migrations.DeleteModel("Site")])
    ]
    outside = migrations.Migration("outside", "pool")
    outside.atomic = False
    for odd in (moved, outside):
        with (
            empty_database("fresh") as fresh,
            mock.patch.object(fresh_database, "_plan", return_value=[known, odd]),
        ):
            assert fresh_database.make(fresh) is False
            assert fresh_database.is_empty(fresh)


def test_every_application_with_tables_has_migrations() -> None:
    """Those without would be made neither by `migrate` nor at once."""
    without = MigrationLoader(None).unmigrated_apps
    assert [
        model for label in without for model in apps.get_app_config(label).get_models() if model._meta.managed
    ] == []
