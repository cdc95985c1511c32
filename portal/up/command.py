"""The four commands as Django sees them (`manage.py help`, `call_command`)."""

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from portal.up import cli


class UpCommand(BaseCommand):
    """Hands its words on to `portal.up.cli`, which manage.py calls directly."""

    name = ""
    requires_system_checks: list[str] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = cli.describe(self.name)

    def run_from_argv(self, argv: list[str]) -> None:
        sys.exit(cli.main(self.name, argv[2:]))

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("words", nargs="*")

    def handle(self, *args: Any, **options: Any) -> None:
        code = cli.main(self.name, [str(word) for word in options["words"]])
        if code:
            sys.exit(code)
