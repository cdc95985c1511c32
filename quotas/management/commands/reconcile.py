"""Compare use counters with leases, and leases with the ledger, now."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from quotas.services.reconcile import reconcile


class Command(BaseCommand):
    """`reconcile`: the comparison that runs by night. A difference is an incident and is never mended by itself; the
    exit code is 1 then."""

    help = __doc__

    def handle(self, *args: Any, **options: Any) -> None:
        found = reconcile()
        self.stdout.write(
            f"counters: {found.counter_rows} compared with open leases, {len(found.counter_differences)} differ"
        )
        self.stdout.write(
            f"ledger: {found.closed_spans} ended leases compared, {len(found.ledger_differences)} differ"
        )
        self.stdout.write(f"sums: {found.summed_lines} lines, {len(found.sum_differences)} sums differ")
        for difference in [*found.counter_differences, *found.ledger_differences, *found.sum_differences][
            :50
        ]:
            self.stdout.write("  " + ", ".join(f"{name} {value}" for name, value in difference.items()))
        if found.differences:
            raise CommandError("Something differs: an incident is open, nothing was changed.")
