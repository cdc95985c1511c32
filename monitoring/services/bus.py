"""Tell the hubs of all web processes over Redis. Losing a message costs freshness, never data."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import redis
import structlog
from django.conf import settings

from monitoring.engine.frames import bus_facts

log = structlog.get_logger(__name__)
CHANNEL = "gpupool:telemetry"


@cache
def _client() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=2, socket_connect_timeout=2)


def publish(message: bytes) -> bool:
    """Send one message to every hub; False when Redis is away (the state is in the database and is read again)."""
    try:
        _client().publish(CHANNEL, message)
    except redis.RedisError as error:
        log.warning("telemetry_publish_failed", error=type(error).__name__)
        return False
    return True


def facts_changed(*, gpu_ids: Iterable[int] = (), inventory: bool = False) -> None:
    """Leases, conditions or the fleet changed: hubs read these cards (or the whole list) again."""
    facts: dict[str, Any] = {"gpus": sorted(set(gpu_ids))}
    if inventory:
        facts["inventory"] = True
    if facts["gpus"] or inventory:
        publish(bus_facts(**facts))
