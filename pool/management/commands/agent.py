"""`manage.py agent …`: the node agent from this source tree, with the same words as `agent.pyz`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from pool.agent.build import build


class Command(BaseCommand):
    """`build FILE` writes the zipapp; everything else goes to the agent itself, in a process without
    Django."""

    help = "Run the node agent, or write it to a file: agent build agent.pyz"

    def run_from_argv(self, argv: list[str]) -> None:
        """Pass the words on as they are."""
        words = argv[2:]
        if words[:1] == ["build"] and len(words) == 2:
            with open(words[1], "wb") as handle:
                handle.write(build())
            self.stdout.write(f"{words[1]} written")
            return
        command = [sys.executable, "-m", "pool.agent", *words]
        sys.exit(subprocess.run(command, cwd=settings.BASE_DIR, check=False).returncode)

    def handle(self, *args: Any, **options: Any) -> None:
        """Called from Python (`call_command("agent", …)`)."""
        self.run_from_argv(["manage.py", "agent", *[str(word) for word in args]])
