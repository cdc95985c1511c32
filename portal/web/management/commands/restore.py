"""`manage.py restore`: listed here for `manage.py help`; manage.py itself runs it without importing Django."""

from portal.up.command import UpCommand


class Command(UpCommand):
    """See `portal.up.cli`."""

    name = "restore"
