"""What the import commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from portal.accounts.services.importing import ImportResult
from portal.kernel.errors import DomainError
from portal.kernel.tabular import column_of, read_table, row_of
from portal.ops.actor import system


class ImportCommand(BaseCommand):
    """Reads the file, runs the import, prints errors by row and column; exit code 1 when nothing was taken."""

    aliases: Mapping[str, str] = {}
    run_import: Callable[..., ImportResult]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path)
        parser.add_argument("--dry-run", action="store_true", help="say what would be done, write nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        path: Path = options["file"]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from error
        try:
            table = read_table(data, path.name, aliases=self.aliases)
            result = self.run_import(
                acting_user=system("import", via="command"), table=table, dry_run=options["dry_run"]
            )
        except DomainError as error:
            for problem in error.errors:
                self.stderr.write(f"row {row_of(problem) or '-'}, {column_of(problem)}: {problem['detail']}")
            raise CommandError(str(error.detail)) from error
        self.report(result, options)

    def report(self, result: ImportResult, options: dict[str, Any]) -> None:
        """The counts."""
        word = "would be" if result.dry_run else "were"
        self.stdout.write(
            f"{result.created} {word} made, {result.changed} changed, {result.kept} as they are"
        )
