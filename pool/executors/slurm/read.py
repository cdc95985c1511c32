"""Slurm's answers as data: both forms of its JSON (22.05: plain values; 23.02 and later: lists and {set, infinite,
number}). Pure: no calls, no database.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from typing import Any
from uuid import UUID

NAME = "gpupool-"
"""Begins the job name of what we submitted; the allocation's uid follows."""
MARK = "gpupool:"
"""Begins the comment of work that was adopted; the allocation's uid follows."""
OVER = frozenset(
    {
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
        "DEADLINE", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL",
    }
)  # fmt: skip
WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
UUID_TEXT = re.compile(r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE)
_MARKED = re.compile(rf"^{MARK}{UUID_TEXT.pattern} ?", re.IGNORECASE)
_RANGE = re.compile(r"^(.*?)\[([^\]]*)\](.*)$")
_INDEXES = re.compile(r"\(IDX:([0-9,\-]+)\)")
_SOCKETS = re.compile(r"\([^)]*\)")
MOST_HOSTS = 100_000
KEPT = 4096
"""So many texts that were read before are not read anew: jobs and nodes say the same few each second."""


@dataclass(frozen=True)
class Gres:
    """One kind of generic resource: ``gpu`` or ``shard``, its type ("" where it has none), how many."""

    name: str
    type: str
    count: int
    indexes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """A job as the controller or the accounting knows it. Times are aware UTC; ``exit_code`` and ``signal`` None
    where it is not over. ``gres`` is what it holds on each of ``nodes``, in their order (empty: not known)."""

    id: str
    name: str
    states: frozenset[str]
    user: str = ""
    account: str = ""
    comment: str = ""
    partition: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    gres: tuple[tuple[Gres, ...], ...] = ()
    exit_code: int | None = None
    signal: int | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    restarts: int = 0
    cpus: int = 0
    memory_mib: int = 0
    gpus: int = 0

    @cached_property
    def uid(self) -> UUID | None:
        """The allocation it carries: by its name, or by the comment of adopted work."""
        for text, mark in ((self.name, NAME), (self.comment, MARK)):
            if text.startswith(mark):
                found = UUID_TEXT.match(text[len(mark) :])
                if found:
                    return UUID(found.group())
        return None

    @property
    def adopted(self) -> bool:
        """Whether it was somebody's before it was taken in: it carries an allocation by its comment alone."""
        return self.uid is not None and not self.name.startswith(NAME)

    @property
    def own_comment(self) -> str:
        """Its comment without our mark."""
        return _MARKED.sub("", self.comment)

    @property
    def over(self) -> bool:
        """Whether it ended (its processes may still be going)."""
        return bool(self.states & OVER) and not self.states & WAITING

    @property
    def cleaning(self) -> bool:
        """Whether something of it is still on its nodes."""
        return "COMPLETING" in self.states

    @property
    def waiting(self) -> bool:
        """Whether it holds nothing yet."""
        return bool(self.states & WAITING)


@dataclass(frozen=True)
class SlurmNode:
    """A node as the controller knows it. ``states`` in capitals, base state and flags together."""

    name: str
    states: frozenset[str]
    reason: str = ""
    address: str = ""
    cpus: int = 0
    memory_mib: int = 0
    gres: tuple[Gres, ...] = ()
    used: tuple[Gres, ...] = ()
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    version: str = ""
    os: str = ""
    reservation: str = ""

    @property
    def up(self) -> bool:
        """Whether it answers its controller."""
        bad = {
            "DOWN",
            "UNKNOWN",
            "ERROR",
            "FUTURE",
            "NOT_RESPONDING",
            "POWERED_DOWN",
            "POWERING_DOWN",
            "FAIL",
        }
        return not self.states & bad

    @property
    def closed(self) -> str:
        """Why it takes no new work, or "": drained, failing, rebooting, in maintenance, reserved."""
        flags = (
            "DRAIN",
            "DRAINED",
            "DRAINING",
            "FAILING",
            "MAINTENANCE",
            "MAINT",
            "REBOOT_REQUESTED",
            "REBOOT_ISSUED",
        )
        found = [flag for flag in flags if flag in self.states]
        return found[0].lower() if found else ""


def number(value: Any) -> int | None:
    """A number of either form; None where it is unset or infinite."""
    if isinstance(value, dict):
        if value.get("set") is False or value.get("infinite"):
            return None
        value = value.get("number")
    if isinstance(value, bool) or value is None or value == "":
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def words(value: Any) -> list[str]:
    """A word or a list of words of either form."""
    if isinstance(value, str):
        return list(_split_words(value))
    return [str(part) for part in value or []]


@lru_cache(KEPT)
def _split_words(text: str) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"[,+ ]", text) if part)


def moment(value: Any) -> datetime | None:
    """A time of either form; None for "not yet"."""
    seconds = number(value)
    if seconds is None or seconds <= 0 or seconds >= 2**32 - 2:
        return None
    return datetime.fromtimestamp(seconds, UTC)


def hosts(text: str | None) -> tuple[str, ...]:
    """The names of a host list: ``gpu[1-3,07],login``. Raises ValueError past ``MOST_HOSTS``."""
    return _hosts(text or "")


@lru_cache(KEPT)
def _hosts(text: str) -> tuple[str, ...]:
    out: list[str] = []
    for part in _parts(text):
        for name in _expand(part):
            out.append(name)
            if len(out) > MOST_HOSTS:
                raise ValueError("a host list of more than 100,000 names")
    return tuple(out)


def _parts(text: str) -> Iterator[str]:
    """Split at commas that are outside brackets."""
    depth, begin = 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            yield text[begin:place]
            begin = place + 1
    if text[begin:]:
        yield text[begin:]


def _expand(text: str) -> Iterator[str]:
    found = _RANGE.match(text)
    if found is None:
        if text and text not in ("(null)", "None", "None assigned", "N/A"):
            yield text
        return
    before, inside, after = found.groups()
    for piece in inside.split(","):
        low, _dash, high = piece.partition("-")
        middle: Iterable[str] = (
            [low] if not high else (str(n).zfill(len(low)) for n in range(int(low), int(high) + 1))
        )
        for value in middle:
            for rest in _expand(after) if after else ("",):
                yield f"{before}{value}{rest}"


def gres(text: str | None) -> tuple[Gres, ...]:
    """``gpu:a100:4(S:0-1),shard:t4:16`` or with indexes ``gpu:a100:2(IDX:0,3)``; without a type ``gpu:4``."""
    return _gres(text or "")


@lru_cache(KEPT)
def _gres(text: str) -> tuple[Gres, ...]:
    out: list[Gres] = []
    for raw in _parts(text):
        if raw in ("(null)", "N/A", "null"):
            continue
        part = raw.removeprefix("gres/").removeprefix("gres:")
        indexes = _INDEXES.search(part)
        bare = _SOCKETS.sub("", part.replace("(null)", ""))
        names = bare.replace("=", ":").split(":")
        count = names[-1] if len(names) > 1 and _count(names[-1]) is not None else "1"
        kind = names[1] if len(names) > 2 or (len(names) == 2 and _count(names[1]) is None) else ""
        out.append(Gres(names[0], kind, _count(count) or 0, _numbers(indexes.group(1)) if indexes else ()))
    return tuple(out)


def _count(text: str) -> int | None:
    factor = {"K": 1024, "M": 1024**2, "G": 1024**3}.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    return int(digits) * factor if digits.isascii() and digits.isdecimal() else None


def _numbers(text: str) -> tuple[int, ...]:
    out: list[int] = []
    for piece in text.split(","):
        low, _dash, high = piece.partition("-")
        if low.isdecimal():
            out.extend(range(int(low), int(high or low) + 1))
    return tuple(out)


def _exit(value: Any) -> tuple[int | None, int | None]:
    """Exit code and signal: of a wait status (22.05), or of {return_code, signal}."""
    if isinstance(value, dict):
        code, killed = number(value.get("return_code")), value.get("signal")
        signal = (
            number(killed.get("id") or killed.get("signal_id"))
            if isinstance(killed, dict)
            else number(killed)
        )
        return code, signal or None
    status = number(value)
    if status is None:
        return None, None
    return status >> 8, (status & 0x7F) or None


def job(raw: dict[str, Any]) -> Job:
    """A job of `squeue --json` or `GET /slurm/…/jobs`, of either form."""
    states = frozenset(word.upper() for word in words(raw.get("job_state"))) | frozenset(
        word for word in words(raw.get("flags")) if word == "COMPLETING"
    )
    names = hosts(raw.get("nodes") or "")
    over = bool(states & OVER)
    code, signal = _exit(raw.get("exit_code")) if over else (None, None)
    running = not states & WAITING
    held = tuple(gres(item) for item in raw.get("gres_detail") or [])
    tres = trackable(raw.get("tres_alloc_str") or raw.get("tres_req_str"))
    return Job(
        id=str(raw.get("job_id")),
        name=str(raw.get("name") or ""),
        states=states,
        user=str(raw.get("user_name") or ""),
        account=str(raw.get("account") or ""),
        comment=str(raw.get("comment") or ""),
        partition=str(raw.get("partition") or ""),
        reason=str(raw.get("state_reason") or ""),
        nodes=names,
        gres=held,
        exit_code=code,
        signal=signal,
        started_at=moment(raw.get("start_time")) if running else None,
        ended_at=moment(raw.get("end_time")) if not states & WAITING else None,
        restarts=number(raw.get("restart_cnt")) or 0,
        cpus=number(raw.get("cpus")) or 0,
        memory_mib=tres.get("mem", 0),
        gpus=tres.get("gres/gpu", 0),
    )


def trackable(text: str | None) -> Mapping[str, int]:
    """``cpu=2,mem=2000M,gres/gpu=2`` as numbers; memory in MiB."""
    return _trackable(text or "")


@lru_cache(KEPT)
def _trackable(text: str) -> Mapping[str, int]:
    out: dict[str, int] = {}
    for part in text.split(","):
        name, _equal, value = part.partition("=")
        if not value:
            continue
        if name == "mem":
            unit = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}.get(value[-1:].upper())
            digits = value[:-1] if unit else value
            try:
                out[name] = round(float(digits) * (unit or 1))
            except ValueError:
                continue
        elif value.isascii() and value.isdecimal():
            out[name] = int(value)
    return out


def node(raw: dict[str, Any]) -> SlurmNode:
    """A node of `sinfo --json`, `scontrol show nodes --json` or `GET /slurm/…/nodes`, of either form."""
    states = {word.upper() for word in words(raw.get("state"))}
    states |= {word.upper() for word in words(raw.get("state_flags"))}
    return SlurmNode(
        name=str(raw.get("name") or ""),
        states=state_words(states),
        reason=str(raw.get("reason") or ""),
        address=str(raw.get("address") or ""),
        cpus=number(raw.get("cpus")) or 0,
        memory_mib=number(raw.get("real_memory")) or 0,
        gres=gres(raw.get("gres")),
        used=gres(raw.get("gres_used")),
        features=tuple(words(raw.get("features"))),
        partitions=tuple(words(raw.get("partitions"))),
        version=str(raw.get("slurmd_version") or raw.get("version") or ""),
        os=str(raw.get("operating_system") or ""),
        reservation=str(raw.get("reservation") or ""),
    )


def state_words(found: Iterable[str]) -> frozenset[str]:
    """State words with the signs of the short form (``DOWN*``) as words of their own."""
    out: set[str] = set()
    for word in found:
        out.add(word.rstrip("*~#!%$@^-"))
        if "*" in word:
            out.add("NOT_RESPONDING")
        if word.endswith("~"):
            out.add("POWERED_DOWN")
        if word.endswith("$"):
            out.add("MAINTENANCE")
        if word.endswith(("@", "^")):
            out.add("REBOOT_REQUESTED")
    return frozenset(out)


def accounted_json(raw: dict[str, Any]) -> Job:
    """A job of `GET /slurmdb/…/jobs` or `sacct --json`, of either form."""
    times, state = raw.get("time") or {}, raw.get("state") or {}
    states = frozenset(word.upper() for word in words(state.get("current")))
    code, signal = _exit(raw.get("exit_code"))
    held = {
        f"{item.get('type')}/{item['name']}" if item.get("name") else str(item.get("type")): number(
            item.get("count")
        )
        for item in (raw.get("tres") or {}).get("allocated") or []
    }
    return Job(
        id=str(raw.get("job_id")),
        name=str(raw.get("name") or ""),
        states=states,
        user=str(raw.get("user") or (raw.get("association") or {}).get("user") or ""),
        account=str(raw.get("account") or ""),
        nodes=hosts(raw.get("nodes") or ""),
        exit_code=code,
        signal=signal,
        started_at=moment(times.get("start")),
        ended_at=moment(times.get("end")),
        cpus=held.get("cpu") or 0,
        memory_mib=held.get("mem") or 0,
        gpus=held.get("gres/gpu") or 0,
    )
