"""The cycle at 1,000, 3,000, 10,000 and 30,000 cards, and how its cost grows: the exponent of cost over cards (1 is
linear) between the smallest and the largest pool.

One server; each size in a process of its own on a copy of one migrated database. What each gave is shown at once. A
size that would not be done within `LIMIT_S`, by what the one before it took, is not begun and named in `not_taken`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from typing import Any

SIZES = (1_000, 3_000, 10_000, 30_000)
KEYS = ("whole_p50_ms", "new_request_p50_ms", "admissions_per_s", "memory_mib")
LIMIT_S = 500.0
WHOLE, QUICK = 5, 8
"""Cycles of both kinds at each size."""


def run() -> dict[str, Any]:
    """The figures of each size that there was time for."""
    from tests.perf._database import fresh_database

    began, took = time.monotonic(), 0.0
    sizes: dict[str, Any] = {}
    figures: dict[str, float] = {}
    taken: list[int] = []
    with fresh_database():
        for cards in SIZES:
            expected = took * cards / taken[-1] if taken else 0.0
            if time.monotonic() - began + expected > LIMIT_S:
                break
            at = time.monotonic()
            found = _one(cards)
            took = time.monotonic() - at
            taken.append(cards)
            sizes[f"gpus_{cards}"] = found["sizes"]["gpus"]
            figures |= {f"{key}_{cards}": found["figures"][key] for key in KEYS}
            print(f"{cards} cards, {took:.0f} s: {json.dumps(found['figures'])}", file=sys.stderr, flush=True)
    sizes["not_taken"] = [cards for cards in SIZES if cards not in taken]
    span = math.log(taken[-1] / taken[0])
    for key in ("whole_p50_ms", "new_request_p50_ms") if span else ():
        ratio = max(1.0, figures[f"{key}_{taken[-1]}"]) / max(1.0, figures[f"{key}_{taken[0]}"])
        figures[f"exponent_{key.removesuffix('_ms')}"] = round(math.log(ratio) / span, 2)
    return {"sizes": sizes, "figures": figures, "aims": {"exponent_whole_p50": ["<", 1.2]}}


def _one(cards: int) -> dict[str, Any]:
    """One size in a process of its own, on a copy of the migrated database."""
    from django.db import connection

    name = connection.settings_dict["NAME"]
    url, copy = os.environ["DATABASE_URL"], f"{name}_{cards}"
    connection.close()
    with connection._nodb_cursor() as cursor:
        cursor.execute(f'CREATE DATABASE "{copy}" TEMPLATE "{name}"')
    answer = subprocess.run(
        [sys.executable, "-m", "tests.perf.growth", str(cards)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"DATABASE_URL": url.replace(f"/{name}?", f"/{copy}?", 1)},
    )
    with connection._nodb_cursor() as cursor:
        cursor.execute(f'DROP DATABASE "{copy}" WITH (FORCE)')
    return dict(json.loads(answer.stdout.strip().splitlines()[-1]))


def _alone(cards: int) -> None:
    import django
    import structlog

    django.setup()
    from tests.perf import _pool_scale as pool
    from tests.perf._cycle_run import measure

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    scale = pool.build(cards)
    figures = measure(scale, whole=WHOLE, quick=QUICK, burst=max(100, cards // 10))
    print(json.dumps({"sizes": scale.sizes, "figures": figures}), flush=True)


if __name__ == "__main__":
    _alone(int(sys.argv[1]))
