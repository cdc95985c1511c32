"""Bringing the database up to date, and what only the first start makes: the administrator and this machine's
code."""

import contextlib
import importlib
import json
import os
import pkgutil
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from portal.up.this_node import CODE_FILE

MIGRATION_LOCK = 0x6770_7570  # advisory lock: two starts on one outside database migrate one after the other


def shipped_migrations() -> set[tuple[str, str]]:
    """(application, name) of every migration on disk, found by file names alone: no module is imported."""
    from django.apps import apps
    from django.conf import settings

    found: set[tuple[str, str]] = set()
    for config in apps.get_app_configs():
        module_name = settings.MIGRATION_MODULES.get(config.label) or f"{config.name}.migrations"
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            continue
        for item in pkgutil.iter_modules(module.__path__):
            if not item.ispkg and item.name[0] not in "_~":
                found.add((config.label, item.name))
    return found


def applied_migrations() -> set[tuple[str, str]]:
    """(application, name) of every migration that the database has."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT to_regclass('django_migrations') IS NOT NULL")
        row = cursor.fetchone()
        if not row or not row[0]:
            return set()
        cursor.execute("SELECT app, name FROM django_migrations")
        return {(app, name) for app, name in cursor.fetchall()}


def migrate(say: Callable[[str], None]) -> bool:
    """Apply what is pending; True when something was. A database from a newer version is refused with
    SystemExit."""
    from django.core.management import call_command
    from django.db import connection

    shipped = shipped_migrations()
    applied = applied_migrations()
    ours = {app for app, _ in shipped}
    unknown = {(app, name) for app, name in applied - shipped if app in ours}
    if unknown and not _squashed(unknown):
        app, name = min(unknown)
        raise SystemExit(
            f"the database was written by a newer version (it has {app}.{name}); install that version again."
        )
    pending = shipped - applied
    if not pending:
        return False
    say(f"{len(pending)} migrations" if applied else "new database")
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [MIGRATION_LOCK])
    try:
        call_command("migrate", interactive=False, verbosity=0, skip_checks=True)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [MIGRATION_LOCK])
    return True


def _squashed(unknown: set[tuple[str, str]]) -> bool:
    """Whether the migrations that are in the database only were replaced by ones on disk."""
    from django.db.migrations.loader import MigrationLoader

    loader = MigrationLoader(None)
    replaced = {item for migration in loader.disk_migrations.values() for item in migration.replaces}
    return unknown <= replaced


def prepare(what: dict[str, Any], report: Callable[..., None]) -> int:
    """Migrate; then make the administrator where there is nobody, and the enrolment code of this machine's
    agent.

    `what`: demo (bool), given (bool: the database server is not ours), given_redis (bool), password (str, used when the
    administrator is made), login (str), agent_state (folder path). Reports `say` texts and at last `made`
    (bool).
    """

    def say(text: str) -> None:
        report(say=text)

    if what["given"]:
        ensure_given_database(os.environ["DATABASE_URL"], say)
    if what["given_redis"]:
        ensure_given_redis(os.environ["REDIS_URL"])
    migrate(say)
    made = False
    if not what["demo"]:
        made = first_administrator(what["login"], what["password"])
    report(made=made, agent=agent_code(Path(what["agent_state"]), say))
    return 0


def ensure_given_database(url: str, say: Callable[[str], None]) -> None:
    """Make the database on a given server where it is missing; SystemExit in one line where it cannot be
    reached."""
    import psycopg
    import psycopg.sql

    try:
        psycopg.connect(url, connect_timeout=10).close()
        return
    except psycopg.OperationalError as error:
        # Each address that was tried has a line; questions to the reader are indented.
        reason = [line for line in str(error).splitlines() if line.strip() and not line[0].isspace()][-1]
    parts = urllib.parse.urlsplit(url)
    name = urllib.parse.unquote(parts.path.lstrip("/"))
    try:
        with psycopg.connect(
            parts._replace(path="/postgres").geturl(), connect_timeout=10, autocommit=True
        ) as server:
            if server.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone():
                raise SystemExit(f"the database {name} at DATABASE_URL cannot be opened: {reason}")
            server.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
    except psycopg.Error:
        raise SystemExit(f"the database at DATABASE_URL cannot be reached: {reason}") from None
    say(f"made the database {name}")


def ensure_given_redis(url: str) -> None:
    """SystemExit in one line where the given Redis does not answer."""
    import redis

    try:
        redis.Redis.from_url(url, socket_connect_timeout=10, socket_timeout=10).ping()
    except (redis.RedisError, ValueError) as error:
        raise SystemExit(f"the Redis at REDIS_URL cannot be reached: {error}") from None


def first_administrator(login: str, password: str) -> bool:
    """Make the administrator of an installation without people; False where somebody is there already."""
    from django.contrib.auth import get_user_model

    if get_user_model()._default_manager.exists():
        return False
    from portal.accounts.services.first import first_administrator_create

    return first_administrator_create(login=login, password=password)


def agent_code(state: Path, say: Callable[[str], None]) -> bool:
    """Write a one-time code for this machine's agent unless it has enrolled before; whether the agent can
    run."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _has_token(state / "agent.json"):
        return True
    try:
        from pool.services.enrolment import enrolment_code_create
    except ImportError:
        say("this version has no agent for this machine; it runs without one")
        return False
    from portal.ops.actor import system

    code = enrolment_code_create(acting_user=system("up", via="command"), note="this machine")
    code_file = state / CODE_FILE
    descriptor = os.open(code_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as handle:
        handle.write(code)
    return True


def _has_token(file: Path) -> bool:
    """Whether the agent's settings hold a node token, that is, whether it has enrolled."""
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads(file.read_text()).get("token"))
    return False
