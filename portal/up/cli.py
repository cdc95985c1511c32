"""The command lines of up, demo_remove, backup and restore; each failure is one line and an exit code above
0."""

import argparse
import importlib.util
import sys
from pathlib import Path

from portal.up.errors import UpError
from portal.up.layout import default_root

COMMANDS = ("up", "demo_remove", "backup", "restore")


ABOUT = {
    "up": "Run the whole installation on this machine until Ctrl-C.",
    "demo_remove": "Drop the demo's database and files.",
    "backup": "Write the whole installation (database, media, secrets) to one file.",
    "restore": "Bring an installation back from a backup, into an empty data folder.",
}


def describe(command: str) -> str:
    """What a command does, in one sentence."""
    return ABOUT[command]


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"manage.py {command}", description=describe(command))
    parser.add_argument("--data", type=Path, default=None, metavar="DIR", help="data folder (default: data)")
    if command == "up":
        parser.add_argument("--demo", action="store_true", help="a simulated fleet in a database of its own")
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
        parser.add_argument(
            "--port", type=int, default=8000, help="port to listen on (default: 8000; 0: a free one)"
        )
        parser.add_argument("--no-agent", action="store_true", help="do not offer this machine's own GPUs")
    if command in ("backup", "restore"):
        parser.add_argument("file", type=Path, metavar="FILE")
        parser.add_argument("--demo", action="store_true", help="the demo's database instead")
    return parser


def _plain(argv: list[str]) -> list[str]:
    """Without the options that Django's own command line adds and these commands have no use for."""
    return [
        word for word in argv if word not in ("--no-color", "--force-color", "--traceback", "--skip-checks")
    ]


def main(command: str, argv: list[str]) -> int:
    """Run one of the four commands and give its exit code."""
    arguments = _parser(command).parse_args(_plain(argv))
    root = arguments.data.expanduser().absolute() if arguments.data else default_root()
    try:
        if command == "up":
            if importlib.util.find_spec("django") is None:
                raise UpError("its packages are not installed: run `pip install -e .` first (see README.md).")
            from portal.up.supervisor import Options, Supervisor

            options = Options(root, arguments.demo, arguments.host, arguments.port, not arguments.no_agent)
            return Supervisor(options).run()
        from portal.up import archive

        if command == "demo_remove":
            return archive.demo_remove(root)
        run = archive.backup if command == "backup" else archive.restore
        return run(arguments.file.expanduser().absolute(), root, demo=arguments.demo)
    except UpError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
