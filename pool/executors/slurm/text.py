"""Slurm's answers in text: `scontrol show node`, and `sacct` with fields of our choice. Pure: no calls, no database."""

from __future__ import annotations

import re

from pool.executors.slurm.read import (
    Job,
    SlurmNode,
    gres,
    hosts,
    moment,
    number,
    state_words,
    trackable,
    words,
)

_FIELD = re.compile(r"(?:^|\s)([A-Z][A-Za-z:/_]*)=")


def fields(line: str) -> dict[str, str]:
    """``Name=Value`` pairs of one record; values may hold blanks (OS, Reason)."""
    places = list(_FIELD.finditer(line))
    ends = [place.start() for place in places[1:]] + [len(line)]
    return {place.group(1): line[place.end() : end].strip() for place, end in zip(places, ends, strict=True)}


def nodes_text(text: str) -> list[SlurmNode]:
    """Nodes of `scontrol show node`, in one line each or in paragraphs."""
    out: list[SlurmNode] = []
    for block in re.split(r"\n(?=NodeName=)", text.strip()):
        found = fields(" ".join(block.split()))
        if not found.get("NodeName"):
            continue
        features = found.get("AvailableFeatures", "")
        out.append(
            SlurmNode(
                name=found["NodeName"],
                states=state_words(found.get("State", "").upper().split("+")),
                reason=found.get("Reason", ""),
                address=found.get("NodeAddr", ""),
                cpus=int(found.get("CPUTot") or 0),
                memory_mib=int(found.get("RealMemory") or 0),
                gres=gres(found.get("Gres")),
                used=gres(found.get("GresUsed")),
                features=() if features == "(null)" else tuple(words(features)),
                partitions=tuple(words(found.get("Partitions"))),
                version=found.get("Version", ""),
                os=found.get("OS", ""),
            )
        )
    return out


SACCT_FIELDS = "JobIDRaw,State,ExitCode,Start,End,Account,User,NodeList,AllocTRES,JobName"
"""The name last: it alone may hold the separator."""


def accounted(text: str) -> list[Job]:
    """Jobs of `sacct -X -n -P -o SACCT_FIELDS` with SLURM_TIME_FORMAT=%s."""
    out: list[Job] = []
    for line in text.splitlines():
        parts = line.split("|", 9)
        if len(parts) != 10:
            continue
        ident, state, code, start, end, account, user, names, tres, name = parts
        returned, _colon, killed = code.partition(":")
        held = trackable(tres)
        out.append(
            Job(
                id=ident,
                name=name,
                states=frozenset({state.split(" ")[0].upper()}),  # "CANCELLED by 0"
                user=user,
                account=account,
                nodes=hosts(names),
                exit_code=number(returned),
                signal=number(killed) or None,
                started_at=moment(start),
                ended_at=moment(end),
                cpus=held.get("cpu", 0),
                memory_mib=held.get("mem", 0),
                gpus=held.get("gres/gpu", 0),
            )
        )
    return out
