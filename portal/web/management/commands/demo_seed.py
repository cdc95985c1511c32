"""`manage.py demo_seed --stage first|history`: fill the demonstration's database."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser


class Command(BaseCommand):
    """Safe to run again: what is there stays. Works on a database of the demo only."""

    help = "Fill the demonstration: people and fleet first, then 90 days of history"
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Which part."""
        parser.add_argument("--stage", choices=["first", "history"], required=True)
        parser.add_argument("--folder", type=Path, default=None, help="where the fleet file lies")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run one stage."""
        if not settings.GPUPOOL_DEMO:
            raise CommandError(
                "GPUPOOL_DEMO is not set: this would write invented data into a real database."
            )
        folder = options["folder"] or settings.GPUPOOL_DATA_DIR
        began = time.monotonic()
        if options["stage"] == "first":
            from portal.demo.first import seed

            made = seed(folder)
        else:
            from portal.demo.history import fill

            made = fill(say=self.stdout.write)
        words = "done" if made else "was there already"
        self.stdout.write(f"demo, {options['stage']}: {words} ({time.monotonic() - began:.1f} s)")
