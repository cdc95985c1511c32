"""The address of the database that a test uses, for a process of its own."""

from urllib.parse import quote

from django.db import connection


def database_url(name: str | None = None) -> str:
    """As DATABASE_URL: over TCP, or over the socket's folder as with the embedded PostgreSQL; of the tests' own
    database or of another one on its server.
    """
    named = connection.settings_dict
    database = name or named["NAME"]
    who = quote(named["USER"], safe="")
    if named["PASSWORD"]:
        who += ":" + quote(named["PASSWORD"], safe="")
    host = named["HOST"] or named["OPTIONS"].get("host", "")
    if host.startswith("/") or not host:
        return f"postgres://{who}@/{database}" + (f"?host={quote(host, safe='')}" if host else "")
    return f"postgres://{who}@{host}:{named['PORT'] or 5432}/{database}"
