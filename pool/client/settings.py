"""What the client remembers: the installation and the token (mode 0600), and where each run's folder lies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pool.agent import files

MOST_RUNS = 200


@dataclass
class Settings:
    """``ca_file``: the enterprise's own certificate authority, in PEM."""

    url: str = ""
    token: str = ""
    ca_file: str = ""


def folder() -> str:
    """Where the files lie."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.environ.get("GPUPOOL_CONFIG") or os.path.join(base, "gpupool")


def load() -> Settings:
    """As kept; ``GPUPOOL_URL``, ``GPUPOOL_TOKEN`` and ``GPUPOOL_CA_FILE`` come before it."""
    kept = files.read_json(os.path.join(folder(), "config.json")) or {}
    return Settings(
        url=(os.environ.get("GPUPOOL_URL") or str(kept.get("url") or "")).rstrip("/"),
        token=os.environ.get("GPUPOOL_TOKEN") or str(kept.get("token") or ""),
        ca_file=os.environ.get("GPUPOOL_CA_FILE") or str(kept.get("ca_file") or ""),
    )


def save(settings: Settings) -> str:
    """Keep them; the path they lie at."""
    os.makedirs(folder(), mode=0o700, exist_ok=True)
    path = os.path.join(folder(), "config.json")
    files.write_json(path, {"url": settings.url, "token": settings.token, "ca_file": settings.ca_file})
    return path


def runs() -> dict[str, Any]:
    """Reference of a request → where its folder lies on this machine."""
    found = files.read_json(os.path.join(folder(), "runs.json"))
    return found if isinstance(found, dict) else {}


def remember_run(ref: str, url: str, directory: str) -> None:
    """Note where a run's results belong."""
    known = runs()
    known[ref] = {"url": url, "folder": directory}
    os.makedirs(folder(), mode=0o700, exist_ok=True)
    newest = dict(list(known.items())[-MOST_RUNS:])
    files.write_json(os.path.join(folder(), "runs.json"), newest)
