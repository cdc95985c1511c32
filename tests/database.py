"""The address of the database that a test uses, for a process of its own."""

from urllib.parse import quote

from django.db import connection


def database_url() -> str:
    """As DATABASE_URL: over TCP, or over the socket's folder as with the embedded PostgreSQL."""
    named = connection.settings_dict
    who = quote(named["USER"], safe="")
    if named["PASSWORD"]:
        who += ":" + quote(named["PASSWORD"], safe="")
    host = named["HOST"] or named["OPTIONS"].get("host", "")
    if host.startswith("/") or not host:
        return f"postgres://{who}@/{named['NAME']}" + (f"?host={quote(host, safe='')}" if host else "")
    return f"postgres://{who}@{host}:{named['PORT'] or 5432}/{named['NAME']}"
