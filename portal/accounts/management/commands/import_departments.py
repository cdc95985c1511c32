"""Import departments from a CSV or XLSX file."""

from __future__ import annotations

from portal.accounts.management.importing import ImportCommand
from portal.accounts.services.importing import DEPARTMENT_ALIASES, departments_import


class Command(ImportCommand):
    """`import_departments FILE [--dry-run]`: all or nothing."""

    help = __doc__
    aliases = DEPARTMENT_ALIASES
    run_import = staticmethod(departments_import)
