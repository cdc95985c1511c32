"""The one clock of the installation.

Services never ask the operating system for the time: they call `now()`, so that tests and the demo's
90 days of history can run the real services under a set clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

_set_time: ContextVar[datetime | None] = ContextVar("gpupool_set_time", default=None)


def now() -> datetime:
    """The present moment as an aware UTC datetime (or the set one inside `set_clock`)."""
    return _set_time.get() or datetime.now(UTC)


@contextmanager
def set_clock(moment: datetime) -> Iterator[None]:
    """Freeze `now()` at `moment` (aware) for this context; nested settings restore the outer one."""
    if moment.tzinfo is None:
        raise ValueError("the clock takes aware datetimes only")
    token = _set_time.set(moment.astimezone(UTC))
    try:
        yield
    finally:
        _set_time.reset(token)
