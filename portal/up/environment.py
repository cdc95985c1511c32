"""The environments of children: the site's, from what the person set and what the folder says; and the
agent's."""

import os
import re

from portal.up.address import Address
from portal.up.layout import Layout


def site_settings(layout: Layout, shown: str, keys: dict[str, str]) -> dict[str, str]:
    """What the folder says to every process of the site, and to commands beside it; `shown` is the address."""
    return {
        "GPUPOOL_DATA_DIR": str(layout.home),
        "GPUPOOL_STATUS_FILE": str(layout.status_file),
        "GPUPOOL_BASE_URL": shown,
        "DJANGO_SETTINGS_MODULE": "portal.settings",
        "GPUPOOL_ENV": os.environ.get("GPUPOOL_ENV", "production"),
        "GPUPOOL_SECRET_KEY": os.environ.get("GPUPOOL_SECRET_KEY", keys["secret_key"]),
        **({"GPUPOOL_DEMO": "1"} if layout.demo else {}),
    }


def site_environment(layout: Layout, address: Address, keys: dict[str, str]) -> dict[str, str]:
    """What the site's processes see; the addresses of the two servers are added by the supervisor."""
    environment = {k: v for k, v in os.environ.items() if k != "GPUPOOL_DEMO"}
    environment.update(site_settings(layout, address.shown, keys))
    given = environment.get("GPUPOOL_ALLOWED_HOSTS")
    # This machine's agent asks at its own address, whatever names the outside uses.
    own = address.local[0]
    environment["GPUPOOL_ALLOWED_HOSTS"] = f"{given},{own}" if given else address.allowed_hosts()
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    environment.setdefault("MALLOC_ARENA_MAX", "2")
    return environment


def agent_environment() -> dict[str, str]:
    """What this machine's agent sees: none of the installation's secrets, since jobs inherit from it."""
    ours = ("GPUPOOL_", "DATABASE_URL", "REDIS_URL", "DJANGO_", "PG")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) or k.startswith("GPUPOOL_AGENT")}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def beside(url: str, database: str) -> str:
    """The URL of another database on the same server."""
    head, _, query = url.partition("?")
    return f"{head.rpartition('/')[0]}/{database}" + (f"?{query}" if query else "")


def other_number(url: str) -> str:
    """The same Redis server with the next database number."""
    if url.startswith("unix:"):
        head, _, query = url.partition("?")
        found = re.search(r"(?:^|&)db=(\d+)", query)
        return f"{head}?db={int(found.group(1)) + 1 if found else 1}"
    found = re.search(r"/(\d+)$", url)
    return f"{url[: found.start()]}/{int(found.group(1)) + 1}" if found else url.rstrip("/") + "/1"
