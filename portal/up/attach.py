"""Management commands beside a running `up`: they work on its database, not on the one that development defaults to."""

import json
import os
from typing import Any

from portal.up.environment import site_settings
from portal.up.errors import UpError
from portal.up.layout import Layout, default_root, load_secrets
from portal.up.postgres import EmbeddedPostgres
from portal.up.valkey import EmbeddedValkey


def attach() -> None:
    """Set the variables that lead to the installation that runs on the data folder now.

    Nothing changes where DATABASE_URL is set, where nothing runs there, or where the folder is another account's.
    """
    if "DATABASE_URL" in os.environ or os.environ.get("GPUPOOL_ENV") == "test":
        return
    layout = Layout(default_root())
    try:
        if not layout.is_running():
            return
        pid = int((layout.root / "lock").read_text())
        layout, status = next(
            (one, found)
            for one in (layout, Layout(layout.root, demo=True))
            if (found := _status(one)).get("supervisor", {}).get("pid") == pid
        )
        keys = load_secrets(layout)
    except (OSError, ValueError, StopIteration, UpError):
        return
    database = EmbeddedPostgres.of(layout, keys)
    if not database.is_made:
        return  # it runs on servers that somebody else looks after
    valkey = EmbeddedValkey.of(layout, database.account)
    os.environ.update(site_settings(layout, status["address"], keys))
    os.environ["DATABASE_URL"] = database.url(layout.database)
    os.environ.setdefault("REDIS_URL", valkey.url(layout.redis_db))


def _status(layout: Layout) -> dict[str, Any]:
    try:
        return dict(json.loads(layout.status_file.read_text()))
    except FileNotFoundError:
        return {}
