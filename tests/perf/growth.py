"""The cycle at 1,000, 3,000, 10,000 and 30,000 cards, and how its cost grows: the exponent of cost over cards (1 is
linear) between the smallest and the largest pool.
"""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

SIZES = (1_000, 3_000, 10_000, 30_000)
KEYS = ("whole_p50_ms", "new_request_p50_ms", "admissions_per_s", "memory_mib")


def run() -> dict[str, Any]:
    """Each size in a process and a database of its own."""
    sizes: dict[str, int] = {}
    figures: dict[str, float] = {}
    for cards in SIZES:
        found = _one(cards)
        sizes[f"gpus_{cards}"] = found["sizes"]["gpus"]
        figures |= {f"{key}_{cards}": found["figures"][key] for key in KEYS}
    span = math.log(SIZES[-1] / SIZES[0])
    for key in ("whole_p50_ms", "new_request_p50_ms"):
        ratio = max(1.0, figures[f"{key}_{SIZES[-1]}"]) / max(1.0, figures[f"{key}_{SIZES[0]}"])
        figures[f"exponent_{key.removesuffix('_ms')}"] = round(math.log(ratio) / span, 2)
    return {"sizes": sizes, "figures": figures, "aims": {"exponent_whole_p50": ["<", 1.2]}}


def _one(cards: int) -> dict[str, Any]:
    import json

    out = subprocess.run(
        [sys.executable, "-m", "tests.perf.growth", str(cards)], capture_output=True, text=True, check=True
    )
    return dict(json.loads(out.stdout.strip().splitlines()[-1]))


def _alone(cards: int) -> None:
    import json

    from tests.perf._database import fresh_database

    with fresh_database():
        import structlog

        from tests.perf import _pool_scale as pool
        from tests.perf._cycle_run import measure

        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
        scale = pool.build(cards)
        figures = measure(scale, whole=8, quick=8, burst=max(100, cards // 10))
        print(json.dumps({"sizes": scale.sizes, "figures": figures}), flush=True)


if __name__ == "__main__":
    _alone(int(sys.argv[1]))
