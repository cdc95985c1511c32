"""`manage.py decision_replay ID`: decide again what a cycle decided, from what was kept of it, and compare."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from pool.models import SchedulerCycle
from pool.services.decisions import decision_replay
from portal.kernel.errors import DomainError


class Command(BaseCommand):
    """Prints a JSON line; the exit code is 0 where the same plan came out, 1 where another did."""

    help = "Replay a decision of the scheduler from its stored snapshot and policy version"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """One number of a cycle, or `last`."""
        parser.add_argument("cycle", help="number of the cycle, or: last")

    def handle(self, *args: Any, **options: Any) -> None:
        """Replay and say whether it is identical."""
        wanted = str(options["cycle"])
        rows = SchedulerCycle.objects.select_related("policy", "snapshot")
        if wanted == "last":
            cycle = rows.filter(snapshot__isnull=False).order_by("-id").first()
        else:
            cycle = rows.filter(pk=int(wanted)).first() if wanted.isdecimal() else None
        if cycle is None:
            raise CommandError("no such cycle")
        try:
            found = decision_replay(cycle=cycle)
        except DomainError as error:
            raise CommandError(f"{error.code}: {error.detail}") from error
        line = {
            "cycle": cycle.pk,
            "identical": found.identical,
            "snapshot_hash": cycle.snapshot_hash,
            "policy": cycle.policy_id,
            "ops": found.ops,
            "differing": list(found.differing),
        }
        self.stdout.write(json.dumps(line))
        if not found.identical:
            raise CommandError("another plan came out", returncode=1)
