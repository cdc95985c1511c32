"""The agent's command line: enrol, run, status, systemd-unit."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from typing import TYPE_CHECKING

from pool.agent import VERSION

if TYPE_CHECKING:
    from pool.agent.config import Config

UNIT = """\
[Unit]
Description=GPU pool node agent
Wants=network-online.target
After=network-online.target nvidia-persistenced.service

[Service]
Type=simple
ExecStart={python} {program} --state {state} run
Restart=always
RestartSec=5
# Jobs have processes of their own that must outlive a restart of the agent.
KillMode=process
TimeoutStopSec=20
UMask=0022
{user}
[Install]
WantedBy=multi-user.target
"""


def parser() -> argparse.ArgumentParser:
    from pool.agent.config import default_state_dir

    top = argparse.ArgumentParser(prog="agent.pyz", description="GPU pool node agent")
    top.add_argument("--state", default=default_state_dir(), help="folder for settings, queue and jobs")
    top.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    commands = top.add_subparsers(dest="command")
    enrol = commands.add_parser("enrol", help="exchange a one-time code for this node's token")
    enrol.add_argument("code")
    enrol.add_argument("--url", required=True, help="address of the installation")
    enrol.add_argument("--ca-file", help="certificate authority of the installation, in PEM")
    enrol.add_argument("--job-account", help="account for people without one here (a root agent only)")
    enrol.add_argument("--work-dir", help="folder of the jobs' work folders")
    run = commands.add_parser("run", help="run until stopped")
    run.add_argument("--url", help="reach the installation at this address from now on")
    run.add_argument("--ca-file", help="certificate authority of the installation, in PEM")
    run.add_argument("--code-file", help="enrol first with the code in this file, when not enrolled")
    run.add_argument("--job-account", help="account for people without one here (a root agent only)")
    run.add_argument("--demo", action="store_true", help="a root agent runs unmapped people's jobs as nobody")
    status = commands.add_parser("status", help="print what the running agent last wrote, as JSON")
    unit = commands.add_parser("systemd-unit", help="print a systemd unit for this file")
    unit.add_argument("--user", help="run as this account instead of root")
    commands.add_parser("version", help="print the version")
    for command in (enrol, run, status, unit):
        # Also after the command; SUPPRESS keeps the value that was given before it.
        command.add_argument("--state", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return top


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.command is None:
        parser().print_help()
        return 2
    return COMMANDS[options.command](options)


def _enrol(options: argparse.Namespace) -> int:
    from pool.agent import config
    from pool.agent.enrol import EnrolError, enrol

    config.prepare(options.state)
    settings = config.load(options.state)
    settings.job_account = options.job_account or settings.job_account
    settings.work_dir = os.path.abspath(options.work_dir) if options.work_dir else settings.work_dir
    try:
        settings = enrol(options.state, options.url, options.code, options.ca_file, settings)
    except EnrolError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"enrolled as node {settings.node_uid}; start with: {sys.argv[0]} run")
    return 0


def _run(options: argparse.Namespace) -> int:
    from pool.agent import config
    from pool.agent.runner import AlreadyRunning, run_agent

    logging.basicConfig(level=options.log_level, format="%(asctime)s %(levelname)s %(message)s")
    config.prepare(options.state)
    settings = config.load(options.state)
    if options.job_account or options.demo:
        settings.job_account = options.job_account or settings.job_account or "nobody"
    if not settings.token and options.code_file and options.url:
        problem = _enrol_from_file(options, settings)
        if problem:
            print(problem, file=sys.stderr)
            return 1
    if not settings.token:
        print(f"not enrolled yet ({config.config_path(options.state)} has no token)", file=sys.stderr)
        return 1
    if options.url:
        settings.url = options.url.rstrip("/")
        settings.ws_url = "ws" + settings.url[4:] + "/agent/ws/"
    settings.ca_file = options.ca_file or settings.ca_file
    try:
        asyncio.run(run_agent(options.state, settings))
    except AlreadyRunning:
        print(f"another agent runs on {options.state}", file=sys.stderr)
        return 1
    except PermissionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _enrol_from_file(options: argparse.Namespace, settings: Config) -> str | None:
    """Use the code once and remove its file; a text when that did not work."""
    from pool.agent.enrol import EnrolError, enrol

    try:
        with open(options.code_file) as handle:
            code = handle.read().strip()
        enrol(options.state, options.url, code, options.ca_file, settings)
        os.unlink(options.code_file)
    except (EnrolError, OSError) as error:
        return str(error)
    return None


def _status(options: argparse.Namespace) -> int:
    from pool.agent import config, files, procs

    status = files.read_json(os.path.join(options.state, "status.json")) or {}
    settings = config.load(options.state)
    status["enrolled"] = bool(settings.token)
    status["running"] = procs.alive(status.get("pid"), None)
    if not status["running"]:
        status["connected"] = False
    print(json.dumps(status, indent=1, ensure_ascii=False))
    return 0 if status["running"] and status.get("connected") else 1


def _unit(options: argparse.Namespace) -> int:
    user = f"User={options.user}\n" if options.user else ""
    print(
        UNIT.format(
            python=sys.executable,
            program=os.path.abspath(sys.argv[0]),
            state=os.path.abspath(options.state),
            user=user,
        ),
        end="",
    )
    return 0


def _version(options: argparse.Namespace) -> int:
    print(VERSION)
    return 0


COMMANDS = {"enrol": _enrol, "run": _run, "status": _status, "systemd-unit": _unit, "version": _version}
