"""A fresh, migrated installation database for a measurement: the embedded pair on a temporary folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def fresh_database() -> Iterator[None]:
    """Start the pair, set up Django on it (once a process), migrate; stop and remove it after.

    Must run before anything of Django is imported by the measurement.
    """
    from portal.up.layout import Layout
    from portal.up.pair import running_pair

    with tempfile.TemporaryDirectory(prefix="gpupool-perf-") as scratch:
        Path(scratch).chmod(0o755)
        with running_pair(Layout(Path(scratch) / "pair")) as pair:
            os.environ.update(pair.environment)
            os.environ["DJANGO_SETTINGS_MODULE"] = "portal.settings"
            os.environ["GPUPOOL_ENV"] = "test"
            os.environ["GPUPOOL_TASKS_EAGER"] = "0"  # what workers do beside is not part of the measured path
            os.environ["GPUPOOL_DATA_DIR"] = str(Path(scratch) / "data")
            import django
            from django.core.management import call_command
            from django.db import connections

            django.setup()
            try:
                call_command("migrate", verbosity=0)
                yield
            finally:
                connections.close_all()
