"""Import a fleet from a CSV or XLSX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from pool.services.fleet_import import fleet_import, fleet_plan
from portal.kernel.errors import DomainError
from portal.ops.actor import system


class Command(BaseCommand):
    """`import_fleet FILE [--dry-run] [--site CODE]`: errors by row and column; all or nothing."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file")
        parser.add_argument("--dry-run", action="store_true")
        parser.add_argument("--site", default="", help="site of nodes for which the file names none")
        parser.add_argument("--cluster", default="")

    def handle(self, *args: Any, **options: Any) -> None:
        path = Path(options["file"])
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from error
        try:
            plan = fleet_plan(
                content=content,
                filename=path.name,
                default_site=options["site"],
                default_cluster=options["cluster"],
            )
        except DomainError as error:
            raise CommandError(str(error.detail)) from error
        for problem in plan.problems:
            self.stderr.write(f"{problem['pointer']}: {problem['detail']}")
        if plan.problems:
            raise CommandError(f"{len(plan.problems)} problems; nothing was imported")
        self.stdout.write(
            f"{len(plan.nodes)} nodes ({plan.new_nodes} new), {plan.gpus} GPUs: {dict(plan.models)}"
        )
        if options["dry_run"]:
            self.stdout.write("dry run: nothing was imported")
            return
        done = fleet_import(acting_user=system("import_fleet", via="command"), plan=plan)
        self.stdout.write(
            f"imported: {done['nodes_new']} new nodes, {done['nodes_known']} updated, {done['gpus_new']} new GPUs"
        )
