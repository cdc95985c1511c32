"""Import people from a CSV or XLSX file; first passwords are printed once, or written to a file."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser

from portal.accounts.management.importing import ImportCommand
from portal.accounts.services.importing import PEOPLE_ALIASES, ImportResult, people_import


class Command(ImportCommand):
    """`import_people FILE [--dry-run] [--passwords OUT.csv]`: all or nothing."""

    help = __doc__
    aliases = PEOPLE_ALIASES
    run_import = staticmethod(people_import)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--passwords", type=Path, help="write the first passwords there (mode 0600)")

    def report(self, result: ImportResult, options: dict[str, Any]) -> None:
        """The counts, and the first passwords."""
        super().report(result, options)
        if not result.passwords:
            return
        if options["passwords"] is None:
            for name, value in result.passwords:
                self.stdout.write(f"{name},{value}")
            return
        descriptor = os.open(options["passwords"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", newline="", encoding="utf-8") as handle:
            writer = csv.writer(handle)
            writer.writerow(["username", "first_password"])
            writer.writerows(result.passwords)
