"""Requests: made from options, listed, explained, given back."""

from __future__ import annotations

import argparse
import re
import uuid
from typing import Any

from pool.client.api import Api
from pool.client.words import say, text

UNITS = {"m": 60, "h": 3600, "d": 86400}
OPEN = ("in_approval", "returned", "needs_consent", "queued", "allocated", "series")


class Usage(Exception):
    """The command line cannot be carried out; the text says why."""


def gpus(words: str) -> dict[str, Any]:
    """``0.3`` is a fraction of one GPU, ``2`` whole ones, ``0.3x2`` a fraction of each of two, ``0`` none (where the
    installation offers it)."""
    if words == "0":
        return {"shape": "cpu"}
    share, cross, count = words.partition("x")
    match = re.fullmatch(r"0?\.(\d{1,3})", share)
    if match and (count.isdecimal() if cross else True) and int(match.group(1)) and count != "0":
        return {
            "shape": "fraction",
            "fraction_milli": int(match.group(1).ljust(3, "0")),
            "gpus_per_node": int(count or 1),
        }
    if share.isdecimal() and int(share) and not cross:
        return {"shape": "whole", "gpus_per_node": int(share)}
    raise argparse.ArgumentTypeError(text("GPU count: a whole number, or a fraction below 1 in thousandths"))


def duration(words: str) -> int:
    """Seconds of ``30m``, ``4h``, ``2d``."""
    match = re.fullmatch(r"(\d{1,6})([mhd])", words)
    if not match or not int(match.group(1)):
        raise argparse.ArgumentTypeError(text("a duration: 30m, 4h, 2d"))
    return int(match.group(1)) * UNITS[match.group(2)]


def add_options(command: argparse.ArgumentParser) -> None:
    """The options that say what is asked."""
    command.add_argument("--gpu", type=gpus, default=gpus("1"), help="2, 0.3, 0.5x2; default 1")
    command.add_argument(
        "--memory", type=int, metavar="GIB", help="GPU memory needed, GiB (of a fraction: its)"
    )
    command.add_argument("--mig", metavar="PROFILE", help="a MIG profile, for example 1g.10gb")
    command.add_argument("--flavour", help="code of a GPU flavour; default: any that fits")
    command.add_argument("--nodes", type=int, default=1)
    command.add_argument("--time", type=duration, default=4 * 3600, metavar="4h", help="at most so long")
    command.add_argument("--department", help="code; default: your own")
    command.add_argument("--purpose", help="for approvers; default: the command")
    command.add_argument("--priority", type=int)
    command.add_argument("--keep", action="store_true", help="not to be interrupted for others")
    command.add_argument("--image", help="container image")
    command.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    command.add_argument("--checkpoint-signal", metavar="SIGUSR1")
    command.add_argument(
        "--data", action="append", default=[], metavar="CODE", help="a data set that it reads"
    )


def body(options: argparse.Namespace, command: str, kind: str) -> dict[str, Any]:
    """The request that the options describe, with a client token of its own."""
    sent: dict[str, Any] = dict(options.gpu)
    if options.mig:
        sent = {"shape": "mig", "mig_profile": options.mig, "mig_count": sent.get("gpus_per_node", 1)}
    elif options.memory and sent["shape"] == "fraction":
        sent["fraction_mib"] = options.memory * 1024
    if options.flavour:
        sent["flavour"] = options.flavour
    elif sent["shape"] != "cpu":
        whole = options.memory if options.memory and sent["shape"] == "whole" else 0
        sent["requirement"] = {"memory_mib": max(1, whole * 1024)}
    environment = {}
    for item in options.env:
        name, equals, value = item.partition("=")
        if not equals:
            raise Usage(f"--env {item}: NAME=VALUE")
        environment[name] = value
    sent.update(
        client_token=uuid.uuid4().hex,
        nodes=options.nodes,
        duration_s=options.time,
        interruptible=not options.keep,
        purpose=options.purpose or f"gpupool: {command or kind}"[:2000],
        run_kind="image" if options.image else kind,
        command=command,
    )
    optional = {
        "department": options.department,
        "priority": options.priority,
        "image": options.image,
        "environment": environment,
        "datasets": options.data,
        "checkpoint": {"signal": options.checkpoint_signal} if options.checkpoint_signal else None,
    }
    sent.update({name: value for name, value in optional.items() if value not in (None, "", {}, [])})
    return sent


def find_request(api: Api, ref: str) -> dict[str, Any]:
    """A request by R-17 or uid."""
    if re.fullmatch(r"[Rr]-\d{1,18}", ref):
        rows = api.get("/requests/", ref=ref)["results"]
        if rows:
            return dict(rows[0])
    elif re.fullmatch(r"[0-9a-fA-F-]{32,36}", ref):
        return dict(api.get(f"/requests/{ref}/"))
    raise Usage(text("no such request or allocation: {ref}", ref=ref))


def find_allocation(api: Api, ref: str | None) -> dict[str, Any]:
    """The newest allocation of R-17, or A-5 itself; without a name the only one of mine that runs."""
    if ref and re.fullmatch(r"[Rr]-\d{1,18}", ref):
        asked = find_request(api, ref)
        if asked["series"] == "service":
            return replica(api, asked)
        rows = api.get("/allocations/", request=asked["uid"])["results"]
    else:
        me = api.get("/me/")["username"]
        rows = api.get("/allocations/", holder=me, open=None if ref else "true", page_size=200)["results"]
        if ref:
            rows = [row for row in rows if ref.upper() == row["ref"] or ref == row["uid"]]
        elif len(rows) > 1:
            known = ", ".join(row["request_ref"] for row in rows)
            raise Usage(text("several of yours run; name one: {refs}", refs=known))
    if not rows:
        raise Usage(
            text("no such request or allocation: {ref}", ref=ref)
            if ref
            else text("you have no running work; name it (R-17)")
        )
    return dict(rows[0])


def replica(api: Api, service: dict[str, Any]) -> dict[str, Any]:
    """The allocation of the replica of a service that is best to talk to now."""
    found = api.get(f"/service-endpoints/{service['uid']}/")["replicas"]
    well = [one for one in found if one["healthy"] is not False]
    if not well:
        raise Usage(text("no replica of {ref} is well", ref=service["ref"]))
    return dict(api.get(f"/allocations/{well[0]['allocation']}/"))


def amount(row: dict[str, Any]) -> str:
    """What a request asks, in a word."""
    if row["shape"] == "fraction":
        share = f"{(row['fraction_milli'] or row['charge_milli']) / 1000:g}"
        return f"{share} GPU" if row["gpus_per_node"] == 1 else f"{share}x{row['gpus_per_node']} GPU"
    if row["shape"] == "cpu":
        return "0 GPU"
    if row["shape"] == "mig":
        return f"{row['mig_count']} x {row['mig_profile']}"
    whole = f"{row['gpus_per_node']} GPU"
    return whole if row["nodes"] == 1 else f"{row['nodes']} x {whole}"


def show_list(api: Api, everything: bool) -> int:
    """My requests: those that are open, or the newest of all."""
    rows = api.get("/requests/", requester="me", page_size=50)["results"]
    rows = [row for row in rows if everything or row["state"] in OPEN]
    if not rows:
        say("nothing to show")
    for row in rows:
        what = (row["command"].splitlines() or [row["image"] or row["run_kind"]])[0][:60]
        line = (row["ref"], row["state"], amount(row), row["flavour"] or "-", row["department"], what)
        print("{:8} {:12} {:12} {:12} {:12} {}".format(*map(str, line)))
    return 0


def reason_of(api: Api, row: dict[str, Any]) -> dict[str, Any] | None:
    """The entry of the line for a queued request, None before the first plan."""
    from pool.client.api import Problem

    try:
        return dict(api.get(f"/queue/{row['uid']}/"))
    except Problem as problem:
        if problem.status == 404:
            return None
        raise


def why(api: Api, ref: str) -> int:
    """What a request waits for, in the installation's words."""
    row = find_request(api, ref)
    print(f"{row['ref']}  {row['state']}  {amount(row)}")
    for step in row["steps"]:
        if step["state"] == "open":
            print(f"  {step['role']} {step['department'] or ''}  {step['due_at'] or ''}")
    if row["state"] == "queued":
        entry = reason_of(api, row)
        if entry is not None:
            print(f"  {entry['words']}")
            print(f"  {entry['position'] or '-'}/{entry['of'] or '-'}")
            if entry["start_from"]:
                print(f"  {entry['start_from']} … {entry['start_to'] or ''} ({entry['basis']})")
    return 0


def give_back(api: Api, ref: str, reason: str = "") -> bool:
    """Release what a request holds, or withdraw it while it holds nothing; False where it is over already."""
    row = find_request(api, ref)
    if row["state"] in ("allocated", "series") or row["state"] == "ended":
        held = api.get("/allocations/", request=row["uid"], open="true")["results"]
        for one in held:
            api.post(f"/allocations/{one['uid']}/release/", {"reason": reason})
            say("released")
        return bool(held)
    api.post(f"/requests/{row['uid']}/withdraw/", {"reason": reason})
    say("withdrawn")
    return True
