#!/usr/bin/env python3
"""Entry point of every command of the installation."""

import os
import sys


def main() -> None:
    """Run a management command; `up` and its kin are dispatched before Django is imported, so they stay
    small."""
    if len(sys.argv) > 1 and sys.argv[1] in ("up", "demo_remove", "backup", "restore"):
        from portal.up.cli import main as run

        sys.exit(run(sys.argv[1], sys.argv[2:]))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")
    try:
        from django.core.management import execute_from_command_line
        from django.db import OperationalError
    except ImportError:
        sys.exit(
            "Django is not installed: run `pip install -e .` in a virtual environment first (see README.md)."
        )
    from portal.up.attach import attach

    attach()
    try:
        execute_from_command_line(sys.argv)
    except OperationalError as error:
        if "--traceback" in sys.argv:
            raise
        sys.exit(
            f"The database does not answer: {error}\nStart the installation (`manage.py up`) and leave "
            "GPUPOOL_DATA_DIR on its data folder where that is not `data`, or set DATABASE_URL."
        )


if __name__ == "__main__":
    main()
