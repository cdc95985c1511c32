"""Make the first administrator where there is nobody yet; prints one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from portal.accounts.services import first_admin_create
from portal.kernel.errors import DomainError


class Command(BaseCommand):
    """`first_sign_in [--username NAME]` prints {"username": …, "password": …, "created": true|false}."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--username", default="admin")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            made = first_admin_create(username=options["username"])
        except DomainError as error:
            details = "; ".join(str(e["detail"]) for e in error.errors)
            raise CommandError(f"{error.detail} {details}".strip()) from error
        self.stdout.write(json.dumps(asdict(made)))
