"""The first code to run: the inner programs are told apart here with few imports, as every job pays for
one."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run an inner program (shim, checkpoint, session, layout, collector) or the command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["_shim"] and len(arguments) >= 2:
        from pool.agent import shim

        return shim.main(arguments[1], int(arguments[2]) if len(arguments) > 2 else -1)
    if arguments[:1] == ["_checkpoint"] and len(arguments) == 3:
        from pool.agent import hook

        return hook.main(arguments[1], arguments[2])
    if arguments[:1] == ["_session"] and len(arguments) == 3:
        from pool.agent import session

        return session.main(arguments[1], int(arguments[2]))
    if arguments[:1] == ["_health"] and len(arguments) == 2:
        from pool.agent import health

        return health.main(arguments[1])
    if arguments[:1] == ["_layout"] and len(arguments) == 2:
        from pool.agent import mig

        return mig.main(arguments[1])
    if arguments[:1] == ["_collect"]:
        from pool.agent import collector

        return collector.child_main()
    from pool.agent import cli

    return cli.main(arguments)
