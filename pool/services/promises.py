"""What the last whole plan promised, told by the planner to whoever asks beside it what a wish would meet.

Not a record: it is lost with Redis, and told again by the next whole cycle.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from django.conf import settings
from django.core.cache import cache
from redis.exceptions import RedisError

from pool.engine.model import Reserve

log = structlog.get_logger(__name__)
KEY = f"pool.promises.{settings.GPUPOOL_VERSION}"
"""Of this release only: another one may know other fields."""
LAST_S = 600
"""A planner makes a whole plan far more often."""


def promises_tell(promised: Sequence[Reserve]) -> None:
    """Keep them for others of this release; a Redis that is away costs nothing but that."""
    try:
        cache.set(KEY, tuple(promised), LAST_S)
    except RedisError as error:
        log.info("promises_not_told", error=type(error).__name__)


def promises_told() -> tuple[Reserve, ...]:
    """Those of the last whole plan; none where nobody knows."""
    try:
        return cache.get(KEY) or ()
    except RedisError:
        return ()
