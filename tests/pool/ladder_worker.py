"""A worker process of its own for tests that kill it between two steps of the ladder.

    python -m tests.pool.ladder_worker PLACE CASE_ID

Steps the case and stops dead (SIGKILL) at PLACE: `in_step` inside the step's transaction, `after_step` once the
step is committed and before what follows after commit, `in_stop` inside the stop's transaction, `in_finish` inside
the closing one (CASE_ID is an allocation then).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any
from unittest import mock


def dead(*_args: Any, **_kwargs: Any) -> None:
    """kill -9 of this very process."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(place: str, number: int) -> None:
    """Set Django up on the test's database, arm the place, and step."""
    import django

    django.setup()
    from datetime import datetime

    from pool.services import closing, hooks, ladder, stopping
    from portal.kernel.clock import set_clock

    targets = {
        "in_step": (hooks, "order_after_commit"),
        "after_step": (hooks, "_order"),
        "in_stop": (stopping, "outbox_add"),
        "after_stop": (stopping, "order_stop"),
        "in_finish": (closing, "_close_case"),
    }
    module, name = targets[place]
    with mock.patch.object(module, name, dead), set_clock(datetime.fromisoformat(sys.argv[3])):
        if place == "in_finish":
            closing.allocation_finish(allocation_id=number)
        else:
            ladder.case_step(case_id=number)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
