"""`python -m tests.perf NAME`: run one measurement and print its JSON line last.

A measurement is a module `tests/perf/NAME.py` with `run() -> dict`, which gives `sizes` (what was measured),
`figures` (numbers with their unit in the name) and `aims` (name of a figure → `["<" or ">=", limit]`). It starts
what it needs by itself. A missed aim is shown, never an error: the exit code is 0 whenever the measurement was
taken.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from typing import Any

import tests.perf


def names() -> list[str]:
    """All measurements there are."""
    return sorted(
        item.name for item in pkgutil.iter_modules(tests.perf.__path__) if not item.name.startswith("_")
    )


def report(name: str, answer: dict[str, Any]) -> str:
    """The JSON line of a measurement: an aim is `["<" or ">=", limit]` (a bare number means "<")."""
    aims = {key: aim if isinstance(aim, list) else ["<", aim] for key, aim in answer.get("aims", {}).items()}
    return json.dumps(
        {"name": name, "sizes": answer.get("sizes", {}), "figures": answer.get("figures", {}), "aims": aims}
    )


def main() -> int:
    """Run what the command line names."""
    if len(sys.argv) != 2 or sys.argv[1] not in names():
        print(f"usage: python -m tests.perf NAME, one of: {', '.join(names())}", file=sys.stderr)
        return 2
    answer = importlib.import_module(f"tests.perf.{sys.argv[1]}").run()
    print(report(sys.argv[1], answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
