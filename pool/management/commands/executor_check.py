"""Look whether clusters answer and are set up."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from pool.executors.base import ExecutorFailure, executor_for
from pool.models import Cluster


class Command(BaseCommand):
    """`executor_check [CLUSTER…]`: ask each cluster (all of them without a name), change nothing. One line a finding;
    the exit code is 1 where one is not good."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("cluster", nargs="*", help="code of a cluster")

    def handle(self, *args: Any, **options: Any) -> None:
        rows = {row.code: row for row in Cluster.objects.select_related("site").order_by("code")}
        unknown = sorted(set(options["cluster"]) - set(rows))
        if unknown:
            raise CommandError(
                f"no such cluster: {', '.join(unknown)}; there are {', '.join(rows) or 'none'}"
            )
        bad = 0
        for code in options["cluster"] or rows:
            try:
                findings = executor_for(rows[code]).check(cluster=rows[code]).findings
            except ExecutorFailure as error:
                findings = [(error.code, False, error.detail)]
            self.stdout.write(f"{code} ({rows[code].executor}): {len(findings)} findings")
            for name, good, detail in findings:
                bad += not good
                self.stdout.write(f"  {'ok ' if good else 'BAD'} {name} {detail}".rstrip())
        if bad:
            raise CommandError(f"{bad} not good")
