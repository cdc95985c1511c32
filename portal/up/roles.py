"""What the forked children do, one function a role. Only here does this package touch Django, and only when
called."""

import logging
import os
import random
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = Callable[..., None]
QUEUES = "schedule,execute,ingest,reports,notify"


def run_role(role: str, arguments: list[Any], report: Report) -> int:
    """Run a role by name in this process and give its exit code."""
    random.seed()
    return {"prepare": prepare, "web": web, "worker": worker, "beat": beat, "manage": manage}[role](
        arguments, report
    )


def web(arguments: list[Any], report: Report) -> int:
    """Serve pages and sockets on a listening descriptor that the supervisor opened: `[descriptor]`."""
    import asyncio

    import uvicorn

    from portal.asgi import application

    listening = socket.socket(fileno=os.dup(int(arguments[0])))
    config = uvicorn.Config(
        application,
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_ping_timeout=60,  # a node that tells a long backlog is read slowly, its pongs too
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=3,
        proxy_headers=True,
        server_header=False,
        forwarded_allow_ips=os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1"),
    )
    server = uvicorn.Server(config)

    async def serve() -> None:
        async def tell() -> None:
            while not server.started:
                await asyncio.sleep(0.01)
            report(ready=True)

        telling = asyncio.create_task(tell())
        await server.serve(sockets=[listening])
        telling.cancel()

    try:
        import uvloop

        uvloop.run(serve())
    except ImportError:
        asyncio.run(serve())
    return 0


def worker(arguments: list[Any], report: Report) -> int:
    """One Celery worker on all queues, its tasks in threads: `[concurrency]`."""
    from celery.signals import worker_ready

    from portal.celery import app

    def tell(**_: Any) -> None:
        report(ready=True)

    worker_ready.connect(tell, weak=False)
    # Two lines for each of a dozen tasks every few seconds would hide what matters; failures are still told.
    for chatty in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    app.worker_main(
        [
            "worker",
            "--pool=threads",
            f"--concurrency={arguments[0]}",
            f"--queues={QUEUES}",
            "--loglevel=INFO",
            "--without-gossip",
            "--without-mingle",
            "--hostname=up@%h",
        ]
    )
    return 0


def beat(arguments: list[Any], report: Report) -> int:
    """The clock of periodic tasks; its state file lies in a folder of the data: `[folder]`."""
    from celery.signals import beat_init

    from portal.celery import app

    def tell(**_: Any) -> None:
        report(ready=True)

    beat_init.connect(tell, weak=False)
    folder = Path(arguments[0])
    folder.mkdir(mode=0o700, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(0)))
    try:
        app.Beat(schedule=str(folder / "schedule"), loglevel="INFO", quiet=True).run()
    except Exception:
        # A power cut can leave the state file unreadable; it only remembers last runs, so a new one is as
        # good.
        for leftover in folder.glob("schedule*"):
            leftover.unlink(missing_ok=True)
        raise
    return 0


def manage(arguments: list[Any], report: Report) -> int:
    """A management command: `[name, *words]`."""
    from django.core.management import execute_from_command_line

    report(ready=True)
    execute_from_command_line(["manage.py", *[str(a) for a in arguments]])
    return 0


def prepare(arguments: list[Any], report: Report) -> int:
    """Bring the database up to date and make what a first start needs: `[what]`, see
    `portal.up.first_start`."""
    from portal.up.first_start import prepare as run

    return run(arguments[0], report)
