"""Work that makes objects by the hundred thousand and keeps them to its end: the collector only costs there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rubbish_left() -> Iterator[None]:
    """No collection of cycles inside: what is made lives until the end, and looking through it again and again is a
    tenth of a decision's time, and most of the time of reading thousands of jobs.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
