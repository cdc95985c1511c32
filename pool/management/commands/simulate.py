"""``manage.py simulate CASES.json``: run a case file through the engines and print a JSON list of results.

No database, cache or queue is touched.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from pool.engine.cases import run_cases


class Command(BaseCommand):
    help = "Run a case file through the engines (no database) and print [{id, result, reasons}] as JSON."
    requires_system_checks: list[str] = []
    requires_migrations_checks = False

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("cases", help="a JSON file {cases: [...]}")

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(json.dumps(run_cases(_read(options["cases"])), ensure_ascii=False))


def _read(name: str) -> list[dict[str, Any]]:
    try:
        document = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(f"{name}: not JSON: {error}") from error
    cases = document.get("cases") if isinstance(document, dict) else None
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise CommandError(f"{name}: wanted an object with a list of cases")
    return cases
