"""What ``/readyz`` asks: database, migrations, Redis. Each with a short time limit and no secrets in its answer."""

from __future__ import annotations

from functools import lru_cache
from typing import TypedDict

import redis
from django.conf import settings
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor


class Check(TypedDict):
    """One part of readiness."""

    name: str
    ok: bool
    detail: str


def database() -> Check:
    """The database answers a query."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError as error:
        return {"name": "database", "ok": False, "detail": type(error).__name__}
    return {"name": "database", "ok": True, "detail": ""}


@lru_cache(maxsize=1)
def _migrated() -> bool:
    """True once no migration is pending; only a True is kept (a False raises, so it is asked again)."""
    executor = MigrationExecutor(connection)
    if executor.migration_plan(executor.loader.graph.leaf_nodes()):
        raise LookupError("pending migrations")
    return True


def migrations() -> Check:
    """The database has the tables of this version."""
    try:
        _migrated()
    except (LookupError, DatabaseError) as error:
        return {
            "name": "migrations",
            "ok": False,
            "detail": str(error) if isinstance(error, LookupError) else type(error).__name__,
        }
    return {"name": "migrations", "ok": True, "detail": ""}


def broker() -> Check:
    """Redis answers."""
    client = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=2, socket_connect_timeout=2)
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        return {"name": "redis", "ok": False, "detail": type(error).__name__}
    finally:
        client.close()
    return {"name": "redis", "ok": True, "detail": ""}


def checks() -> list[Check]:
    """All of them, in order."""
    first = database()
    rest = migrations() if first["ok"] else Check(name="migrations", ok=False, detail="unknown")
    return [first, rest, broker()]
