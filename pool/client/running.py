"""`gpupool run`: the folder goes up, the request is made, its output comes back as it is written, results at the end.

Nothing of it depends on this terminal: the connection may break and come back, and `attach` goes on where it stood.
The first Ctrl-C gives the GPU back and waits for the end, the second stops watching.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from typing import Any

from pool.agent import archive
from pool.client import asking, remote, settings
from pool.client.api import Api, Away, Problem
from pool.client.words import say, text

INTERRUPTED = 130
FAILED = 125
SLOW, QUICK = 2.0, 0.4
GONE = ("rejected", "withdrawn")


def run(api: Api, options: argparse.Namespace) -> int:
    """Ask, follow, bring back; the exit code of the command."""
    command = shlex.join(options.argv)
    sent = asking.body(options, command, "command")
    here = os.path.abspath(options.folder)
    if not options.no_upload:
        send_folder(api, here, sent["client_token"])
    row = ask(api, sent)
    settings.remember_run(row["ref"], api.settings.url, "" if options.no_upload else here)
    say("{ref} asked", ref=row["ref"])
    if options.detach:
        print(row["ref"])
        return 0
    return Follower(api, row, "" if options.no_upload or options.no_results else here).follow()


def ask(api: Api, sent: dict[str, Any]) -> dict[str, Any]:
    """Submit; sent again after a lost answer it is the same request, by its client token."""
    for pause in (0.5, 2.0, 5.0, 10.0):
        try:
            return dict(api.post("/requests/", sent))
        except Away as away:
            say("connection lost ({why}); trying again", why=away)
            time.sleep(pause)
    return dict(api.post("/requests/", sent))


def send_folder(api: Api, folder: str, token: str) -> None:
    """Pack and send; what ``.gpupoolignore`` names, and caches and version control, stay here."""
    ignored = list(archive.LEFT_OUT)
    try:
        with open(os.path.join(folder, ".gpupoolignore"), encoding="utf-8") as handle:
            ignored += archive.patterns(handle.read())
    except FileNotFoundError:
        pass
    with tempfile.TemporaryFile() as packed:
        try:
            done = archive.pack(folder, packed, archive.not_ignored(ignored))
        except archive.BadArchive as bad:
            raise asking.Usage(text("the folder is refused: {why}", why=bad.detail)) from bad
        size = packed.tell()
        packed.seek(0)
        api.call("PUT", f"/work-uploads/{token}/", raw=packed, size=size)
    if done.skipped:
        words = "sent {files} files, {kib} KiB; {skipped} links left out"
        say(words, files=done.files, kib=-(-size // 1024), skipped=done.skipped)
    else:
        say("sent {files} files, {kib} KiB", files=done.files, kib=-(-size // 1024))


class Follower:
    """One request from the line to its end."""

    def __init__(self, api: Api, row: dict[str, Any], results: str, give_back: bool = True) -> None:
        self.api = api
        self.row = row
        self.results = results
        self.give_back = give_back
        self.told = ""
        self.interrupts = 0
        self.seen: dict[str, int] = {}
        self.over: set[str] = set()

    def tell(self, words: str, **values: Any) -> None:
        """Say it once, until something else is to be said."""
        line = text(words, **values)
        if line != self.told:
            self.told = line
            say(words, **values)

    def follow(self) -> int:
        """Watch until it is over or the person has had enough."""
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            return self._follow()
        except KeyboardInterrupt:
            say(
                "it goes on without this terminal; see it again with: gpupool attach {ref}",
                ref=self.row["ref"],
            )
            return INTERRUPTED
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, _number: int, _frame: Any) -> None:
        self.interrupts += 1
        if self.interrupts > 1 or not self.give_back:
            raise KeyboardInterrupt

    def _released(self) -> None:
        """Give back what the first Ctrl-C asked for, once."""
        if self.interrupts == 1:
            self.interrupts = 2
            say("released; Ctrl-C once more to stop watching")
            try:
                asking.give_back(self.api, self.row["ref"], "Ctrl-C")
            except Problem as problem:
                say("{ref} ended: {why}", ref=self.row["ref"], why=problem)

    def _follow(self) -> int:
        pause = QUICK
        while True:
            self._released()
            row = self.row = dict(self.api.get(f"/requests/{self.row['uid']}/"))
            ref, state = row["ref"], row["state"]
            if state in GONE:
                self.tell("{ref} ended: {why}", ref=ref, why=row["end_reason"] or state)
                return INTERRUPTED if self.interrupts else FAILED
            if state == "in_approval":
                who = ", ".join(one["role"] for one in row["steps"] if one["state"] == "open")
                self.tell("{ref} waits for approval by: {who}", ref=ref, who=who)
            elif state == "returned":
                self.tell("{ref} was returned: change it on its page", ref=ref)
            elif state == "needs_consent":
                url = f"{self.api.settings.url}/requests/{row['uid']}/"
                self.tell("{ref} needs your consent to another amount: {url}", ref=ref, url=url)
            elif state == "queued":
                self._in_line(row)
            else:
                code = self._allocated(row)
                if code is not None:
                    return code
                pause = QUICK
                continue
            self._sleep(pause)
            pause = min(SLOW, pause * 1.5)

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.interrupts != 1:
            time.sleep(min(0.1, seconds))

    def _in_line(self, row: dict[str, Any]) -> None:
        entry = asking.reason_of(self.api, row)
        if entry is None:
            return
        if entry["position"]:
            words = "{ref} is in line, position {position} of {of}: {reason}"
            place = {"position": entry["position"], "of": entry["of"] or "-"}
            self.tell(words, ref=row["ref"], reason=entry["words"], **place)
        else:
            self.tell("{ref} is in line: {reason}", ref=row["ref"], reason=entry["words"])

    def _allocated(self, row: dict[str, Any]) -> int | None:
        """Stream the newest allocation; None while it is not known how the request ends."""
        rows = self.api.get("/allocations/", request=row["uid"])["results"]
        rows = [one for one in rows if one["uid"] not in self.over]
        if not rows:
            if row["state"] == "ended":
                self.tell("{ref} ended: {why}", ref=row["ref"], why=row["end_reason"])
                return FAILED
            self._sleep(QUICK)
            return None
        allocation = dict(rows[0])
        end = self._stream(allocation)
        self.over.add(allocation["uid"])
        fresh = dict(self.api.get(f"/allocations/{allocation['uid']}/"))
        if fresh["end_rule"] == "requeue":
            self.tell("{ref} goes back in line ({why})", ref=row["ref"], why=fresh["end_reason"])
            return None
        code = end["exit_code"]
        if self.results:
            self._bring_back(allocation["uid"])
        why = fresh["error_code"] or fresh["end_reason"]
        if code is None:
            say("{ref} ended: {why}", ref=row["ref"], why=why)
            return INTERRUPTED if self.interrupts else FAILED
        if code:
            say("{ref} ended: {why}, exit code {code}", ref=row["ref"], why=why, code=code)
        return int(code)

    def _stream(self, allocation: dict[str, Any]) -> dict[str, Any]:
        """Print output until the end is known and all of it was printed."""
        uid = allocation["uid"]
        names = ", ".join(allocation["nodes"])
        while True:
            self._released()
            got = self.api.get(f"/allocations/{uid}/log-pieces/", after=self.seen.get(uid, -1))
            if got["state"] in ("reserved", "starting"):
                self.tell("{ref} starts on {nodes}", ref=self.row["ref"], nodes=names)
            elif got["state"] == "running":
                self.tell("{ref} runs on {nodes}", ref=self.row["ref"], nodes=names)
            for piece in got["pieces"]:
                sys.stdout.write(piece["text"])
                self.seen[uid] = piece["offset"]
            sys.stdout.flush()
            if not got["pieces"]:
                exited = got["state"] == "stopping" and got["exit_code"] is not None
                if got["state"] == "ended" or exited:
                    return dict(got)
                self._sleep(QUICK)

    def _bring_back(self, uid: str) -> None:
        for pause in (0.5, 2.0, 5.0, None):
            try:
                done = remote.bring_back(self.api, uid, self.results)
                say("brought back {files} files", files=done.files)
                return
            except (remote.Lost, Away, remote.Refusal) as error:
                lasting = isinstance(error, remote.Refusal) and error.code not in ("node_away", "not_running")
                if pause is None or lasting:
                    say("results could not be brought back: {why}", why=error)
                    say("try again with: gpupool cp {ref}:. .", ref=self.row["ref"])
                    return
                time.sleep(pause)


def attach(api: Api, ref: str) -> int:
    """Go on with a run of this machine (or any request of mine): output from its start, results, exit code."""
    row = asking.find_request(api, ref)
    known = settings.runs().get(row["ref"]) or {}
    results = str(known.get("folder") or "") if known.get("url") == api.settings.url else ""
    return Follower(api, row, results if results and os.path.isdir(results) else "").follow()


def logs(api: Api, ref: str | None, follow: bool, member: int) -> int:
    """The output of one member; ``follow``: until its end."""
    allocation = asking.find_allocation(api, ref)
    after = -1
    while True:
        got = api.get(f"/allocations/{allocation['uid']}/log-pieces/", after=after, member=member)
        for piece in got["pieces"]:
            sys.stdout.write(piece["text"])
            after = piece["offset"]
        sys.stdout.flush()
        if not got["pieces"]:
            if not follow or got["state"] == "ended":
                return 0
            time.sleep(QUICK)
