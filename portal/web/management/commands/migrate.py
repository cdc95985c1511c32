"""`migrate`, which makes an empty database in one step."""

from typing import Any

from django.core.management.commands import migrate
from django.db import connections

from portal.kernel import fresh_database

PARTIAL = ("app_label", "migration_name", "plan", "fake", "fake_initial", "check_unapplied", "prune")


class Command(migrate.Command):
    """Django's own, but for a database without tables: there the end of the road is made at once."""

    def handle(self, *args: Any, **options: Any) -> None:
        """Make or migrate. Whoever asks for a part of the migrations, or only for the plan, gets Django's own way."""
        connection = connections[options["database"]]
        whole = not any(options[name] for name in PARTIAL)
        if whole and fresh_database.is_empty(connection):
            if not options["skip_checks"]:
                self.check(databases=[options["database"]])
            if fresh_database.make(
                connection, verbosity=options["verbosity"], interactive=options["interactive"]
            ):
                return
        super().handle(*args, **options)
