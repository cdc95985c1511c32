"""The command line of `gpupool`."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import shlex
import sys
import time

from pool.agent.archive import BadArchive
from pool.client import VERSION, asking, remote, running, settings
from pool.client.api import Api, Away, Problem
from pool.client.words import say, text

REFUSED, AWAY, INTERRUPTED = 1, 3, 130


def parser() -> argparse.ArgumentParser:
    """All commands."""
    top = argparse.ArgumentParser(prog="gpupool", description="The GPU pool from your own machine.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    login = commands.add_parser("login", help="keep the installation's address and a token")
    login.add_argument("url")
    login.add_argument("--ca-file", default="", help="certificate authority of the installation, in PEM")
    login.add_argument("--token-stdin", action="store_true", help="read the token from standard input")
    run = commands.add_parser("run", help="run a command of this folder on a pooled GPU")
    asking.add_options(run)
    run.add_argument("--folder", default=".", help="what to send and where results come; default: here")
    run.add_argument("--no-upload", action="store_true", help="send no folder")
    run.add_argument("--no-results", action="store_true", help="bring nothing back")
    run.add_argument("--detach", action="store_true", help="do not wait")
    run.add_argument("argv", nargs="+", metavar="COMMAND", help="after --")
    attach = commands.add_parser(
        "attach", help="follow a run again, after a cut connection or from elsewhere"
    )
    attach.add_argument("ref")
    request = commands.add_parser("request", help="ask without waiting: a command, or a hold without one")
    asking.add_options(request)
    request.add_argument("argv", nargs="*", metavar="COMMAND")
    ls = commands.add_parser("ls", help="my requests")
    ls.add_argument("--all", action="store_true", help="with those that are over")
    why = commands.add_parser("why", help="what a request waits for")
    why.add_argument("ref")
    logs = commands.add_parser("logs", help="output of a run")
    logs.add_argument("ref", nargs="?")
    logs.add_argument("-f", "--follow", action="store_true", help="until its end")
    logs.add_argument("--member", type=int, default=0, help="rank in a gang")
    release = commands.add_parser("release", help="give back, or withdraw what still waits")
    release.add_argument("ref")
    release.add_argument("--reason", default="")
    shell = commands.add_parser("shell", help="a terminal in a lease")
    shell.add_argument("ref", nargs="?")
    shell.add_argument("--member", type=int, default=0)
    shell.add_argument("argv", nargs="*", metavar="COMMAND", help="after --; default: a shell")
    cp = commands.add_parser("cp", help="copy between here and a work folder (REF:PATH)")
    cp.add_argument("source")
    cp.add_argument("target")
    cp.add_argument("--member", type=int, default=0)
    forward = commands.add_parser("port-forward", help="reach a port of a lease from this machine")
    forward.add_argument("ref")
    forward.add_argument("ports", metavar="[HERE:]THERE")
    forward.add_argument("--member", type=int, default=0)
    report = commands.add_parser("report", help="a report's figures as JSON, or the kinds there are")
    report.add_argument("kind", nargs="?")
    report.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter")
    commands.add_parser("version", help="print the version")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    head, rest = words, []
    if words[:1] == ["shell"] and "--" in words:  # an optional name stands before the command
        cut = words.index("--")
        head, rest = words[:cut], words[cut + 1 :]
    options = parser().parse_args(head)
    if rest:
        options.argv = rest
    if options.command is None:
        parser().print_help()
        return 2
    try:
        return _dispatch(options)
    except Problem as problem:
        for line in problem.lines():
            print(f"gpupool: {line}", file=sys.stderr)
        return REFUSED
    except (asking.Usage, remote.Refusal, BadArchive) as error:
        print(f"gpupool: {error}" + (f" [{error.code}]" if hasattr(error, "code") else ""), file=sys.stderr)
        return REFUSED
    except (Away, remote.Lost) as error:
        print(f"gpupool: {error}", file=sys.stderr)
        return AWAY
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _dispatch(options: argparse.Namespace) -> int:
    if options.command == "version":
        print(VERSION)
        return 0
    if options.command == "login":
        return _login(options)
    kept = settings.load()
    if not kept.url or not kept.token:
        raise asking.Usage(text("not signed in: gpupool login URL"))
    api = Api(kept)
    if options.command == "run":
        return running.run(api, options)
    if options.command == "attach":
        return running.attach(api, options.ref)
    if options.command == "request":
        command = shlex.join(options.argv)
        row = running.ask(api, asking.body(options, command, "command" if command else "hold"))
        print(row["ref"])
        return 0
    if options.command == "ls":
        return asking.show_list(api, options.all)
    if options.command == "why":
        return asking.why(api, options.ref)
    if options.command == "logs":
        return running.logs(api, options.ref, options.follow, options.member)
    if options.command == "release":
        return 0 if asking.give_back(api, options.ref, options.reason) else 1
    if options.command == "report":
        return _report(api, options)
    return _remote(api, options)


def _login(options: argparse.Namespace) -> int:
    url = options.url.rstrip("/")
    if not url.startswith(("https://", "http://")):
        raise asking.Usage(text("the address begins with https:// or http://"))
    token = os.environ.get("GPUPOOL_TOKEN", "")
    if options.token_stdin:
        token = sys.stdin.readline()
    elif not token:
        token = getpass.getpass(
            text("token (made under your name → Tokens, with the scopes read and request): ")
        )
    fresh = settings.Settings(url, token.strip(), os.path.abspath(options.ca_file) if options.ca_file else "")
    me = Api(fresh).call("GET", "/me/")
    say(
        "signed in at {url} as {name}; kept in {path}",
        url=url,
        name=me["username"],
        path=settings.save(fresh),
    )
    return 0


def _report(api: Api, options: argparse.Namespace) -> int:
    values = dict(item.partition("=")[::2] for item in options.set)
    path = f"/reports/{options.kind}/" if options.kind else "/reports/"
    print(json.dumps(api.get(path, **values), indent=1, ensure_ascii=False))
    return 0


def _remote(api: Api, options: argparse.Namespace) -> int:
    if options.command == "cp":
        return _copy(api, options)
    found = asking.find_allocation(api, options.ref)
    if options.command == "shell":
        return remote.shell(api, found["uid"], options.argv, options.member)
    here, _, there = options.ports.rpartition(":")
    if not there.isdecimal() or (here and not here.isdecimal()):
        raise asking.Usage("[HERE:]THERE")
    port = int(here or there)
    moves = options.ref.upper().startswith("R-") and found["request_ref"] != options.ref.upper()
    while True:
        try:
            code = remote.forward(api, found["uid"], found["request_ref"], port, int(there), options.member)
        except (remote.Lost, remote.Refusal):
            if not moves:
                raise
            code = None
        if code is not None or not moves:
            return code or 0
        # A service: its replicas come and go, the port here stays.
        say("{ref}: going over to another replica", ref=options.ref.upper())
        time.sleep(1.0)
        try:
            found = asking.find_allocation(api, options.ref)
        except asking.Usage as error:
            print(f"gpupool: {error}", file=sys.stderr)


def _copy(api: Api, options: argparse.Namespace) -> int:
    def split(words: str) -> tuple[str, str]:
        ref, colon, path = words.partition(":")
        known = ref[:2].upper() in ("R-", "A-") and ref[2:].isdecimal()
        return (ref, path or ".") if colon and known else ("", words)

    (from_ref, source), (to_ref, target) = split(options.source), split(options.target)
    if bool(from_ref) == bool(to_ref):
        raise asking.Usage(text("one side is REF:PATH, the other a path here"))
    uid = asking.find_allocation(api, from_ref or to_ref)["uid"]
    if from_ref:
        done = remote.bring_back(api, uid, target, source, changed=False, member=options.member)
        files, size = done.files, done.bytes
    else:
        sent = remote.send(api, uid, source, target, options.member)
        files, size = sent.files, sent.bytes
    say("copied {files} files, {kib} KiB", files=files, kib=-(-size // 1024))
    return 0
