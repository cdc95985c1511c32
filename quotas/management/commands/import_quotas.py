"""Import quotas from a CSV or XLSX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from portal.kernel.errors import DomainError
from portal.ops.actor import system
from quotas.services.grant_import import quotas_import


class Command(BaseCommand):
    """`import_quotas FILE [--dry-run]`: columns department, flavour (codes), guaranteed, borrow_limit, lend_limit,
    hard_cap (GPUs; empty: unlimited), weight. Errors by row and column; all or nothing."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file")
        parser.add_argument("--dry-run", action="store_true")

    def handle(self, *args: Any, **options: Any) -> None:
        path = Path(options["file"])
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from error
        try:
            done = quotas_import(
                acting_user=system("import_quotas", via="command"),
                policy=None,
                data=data,
                name=path.name,
                dry_run=options["dry_run"],
            )
        except DomainError as error:
            for problem in error.errors:
                self.stderr.write(f"{problem['pointer']}: {problem['detail']}")
            raise CommandError(f"{error.detail} Nothing was set.") from error
        changed = sum(row.changes for row in done.rows)
        self.stdout.write(f"{len(done.rows)} rows, {changed} of them other than what is in force")
        self.stdout.write("dry run: nothing was set" if done.dry_run else f"{changed} quotas set")
