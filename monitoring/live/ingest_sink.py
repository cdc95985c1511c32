"""Where the agent socket hands its samples over."""

from __future__ import annotations

from typing import Any


async def samples_sink(node_id: int, message: dict[str, Any]) -> None:
    """Take one batch of a node's samples; returns once it is durable."""
    raise RuntimeError("telemetry ingest is not installed")
