"""From an allocation's members to a job, and from nodes' GRES to cards: the pool's words in Slurm's."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from pool.executors.base import Found, TerminalFailure
from pool.executors.slurm.read import NAME, SlurmNode
from pool.executors.slurm.script import ScriptOrder, batch_script
from pool.executors.slurm.settings import SlurmSettings
from pool.executors.slurm.transport import JobOrder
from pool.executors.variables import request_variables
from pool.models import AllocationMember, Cluster, Lease
from quotas.selectors.catalogue import MIB_PER_GB, catalogue_match

WHOLE = 1000
FIRST_PORT, PORTS = 20000, 20000
SLACK = timedelta(minutes=15)
"""The pool ends a lease itself; Slurm's limit comes this much later, so that it only guards against our absence."""
LEAST_MEMORY_MIB = 512
MIG_TYPE = re.compile(r"^(?P<card>.+?)_(?P<profile>[1-7]g\.\d+gb(?:\+\w+)?)$", re.IGNORECASE)
MIG_PLAIN = re.compile(r"^(?P<profile>[1-7]g\.\d+gb(?:\+\w+)?)$", re.IGNORECASE)
SLOTS = 8
HOLD = 'echo "This allocation is yours: srun --jobid=$SLURM_JOB_ID --overlap --pty bash"; exec sleep infinity'


# -- cards of a node --------------------------------------------------------------------------------------


def found(node: SlurmNode, settings: SlurmSettings) -> Found:
    """A node as the pool reads it; its cards get made-up UUIDs that name node, type and place."""
    closed = node.closed
    reserved = "RESERVED" in node.states and not settings.reservation
    reason = node.reason or closed
    if not closed and reserved:
        closed, reason = "reserved", f"reserved {node.reservation}".strip()
    return Found(
        name=node.name,
        facts={
            "gres": [[item.name, item.type, item.count] for item in node.gres],
            "partitions": list(node.partitions),
            "slurm": node.version,
            "unknown_types": unknown_types(node, settings),
        },
        up=node.up,
        open=not closed,
        reason=reason if closed else "",
        gpus=tuple(cards(node, settings)),
        cpu_milli=node.cpus * 1000,
        memory_mib=node.memory_mib,
        address=node.address,
        labels={f"slurm/feature/{name}": "1" for name in node.features},
    )


def model_of(kind: str, settings: SlurmSettings) -> tuple[str, int] | None:
    """Model and MiB of a GRES type: by the cluster's own table, else by the catalogue; None for an unknown one."""
    row = settings.models.get(kind)
    if row is not None:
        return str(row["model"]), int(row["memory_mib"])
    known = catalogue_match(kind.replace("_", " "), 0) or catalogue_match(kind, 0)
    return (str(known["name"]), int(known["memory_gb"]) * MIB_PER_GB) if known is not None else None


def unknown_types(node: SlurmNode, settings: SlurmSettings) -> list[str]:
    """GRES types whose cards nobody has told us about: they are left out until the settings name them."""
    kinds = {_card_type(item.type) for item in node.gres if item.name == "gpu"}
    return sorted(kind for kind in kinds if model_of(kind, settings) is None)


def _card_type(kind: str) -> str:
    found = MIG_TYPE.match(kind)
    return found.group("card") if found else kind


def profile_of(kind: str) -> str | None:
    """The MIG profile in a GRES type (``a100_3g.20gb``), or None for whole cards."""
    found = MIG_TYPE.match(kind) or MIG_PLAIN.match(kind)
    return found.group("profile").lower() if found else None


def cards(node: SlurmNode, settings: SlurmSettings) -> list[dict[str, Any]]:
    """One report a card. Whole cards in the order of the GRES line, which is Slurm's own numbering; MIG instances are
    packed onto cards by their memory slots, largest first, as the driver could have made them."""
    out: list[dict[str, Any]] = []
    index = 0
    slices: dict[str, list[str]] = {}
    for item in node.gres:
        if item.name != "gpu":
            continue
        profile = profile_of(item.type)
        if profile is not None:
            slices.setdefault(_card_type(item.type), []).extend([item.type] * item.count)
            continue
        model = model_of(item.type, settings)
        for place in range(item.count):
            if model is not None:
                out.append(_card(node.name, item.type, place, index, model))
            index += 1
    for kind, types in sorted(slices.items()):
        model = model_of(kind, settings)
        if model is None:
            continue
        for place, packed in enumerate(_packed(types)):
            card = _card(node.name, f"{kind}-mig", place, index, model)
            card["mig"] = {
                "enabled": True,
                "slices": [
                    {
                        "uuid": f"{card['uuid']}/{start}",
                        "profile": profile_of(one),
                        "gi": number,
                        "ci": 0,
                        "start": start,
                        "size": size,
                        "memory_mib": _profile_mib(one),
                    }
                    for number, (one, start, size) in enumerate(packed)
                ],
            }
            out.append(card)
            index += 1
    return out


def _card(node: str, kind: str, place: int, index: int, model: tuple[str, int]) -> dict[str, Any]:
    return {
        "uuid": f"SLURM-{node}-{kind or 'gpu'}-{place}"[:80],
        "index": index,
        "name": model[0],
        "memory_mib": model[1],
        "mig": {"enabled": False, "slices": []},
    }


def _profile_mib(kind: str) -> int:
    found = re.search(r"\.(\d+)gb", kind, re.IGNORECASE)
    return int(found.group(1)) * 1024 if found else 0


def _size(kind: str) -> int:
    slices = int((profile_of(kind) or "1")[0])
    return {3: 4, 7: SLOTS}.get(slices, slices)


def _packed(types: list[str]) -> list[list[tuple[str, int, int]]]:
    """Instances as (type, first slot, slots) on as few cards as hold them; each begins at a multiple of its size."""
    packed: list[list[tuple[str, int, int]]] = []
    for kind in sorted(types, key=lambda one: (-_size(one), one)):
        size = _size(kind)
        for card in packed:
            start = _room(card, size)
            if start is not None:
                card.append((kind, start, size))
                break
        else:
            packed.append([(kind, 0, size)])
    return packed


def _room(card: list[tuple[str, int, int]], size: int) -> int | None:
    if sum(int((profile_of(one[0]) or "1")[0]) for one in card) >= 7:
        return None
    taken = {slot for _kind, start, used in card for slot in range(start, start + used)}
    for start in range(0, SLOTS - size + 1, size):
        if not taken & set(range(start, start + size)):
            return start
    return None


# -- the job of an allocation -----------------------------------------------------------------------------


def job_name(member: AllocationMember) -> str:
    """The name that makes a start idempotent."""
    return f"{NAME}{member.allocation.uid}"


def gres_of(member: AllocationMember) -> tuple[str, int]:
    """What a member takes on its node as a GRES list, and how many devices that is. Raises `TerminalFailure`:
    `fractions_not_offered`, `gres_unknown`."""
    leases = list(
        Lease.objects.filter(allocation_id=member.allocation_id, member=member.number, ended_at=None)
        .select_related("gpu", "mig_slice")
        .order_by("gpu__index", "id")
    )
    known = {f"{name}:{kind}" if kind else name: int(count) for name, kind, count in _lines(member)}
    out: Counter[str] = Counter()
    for lease in leases:
        kind = _type_of(lease.gpu.uuid, member.node.name)
        if lease.mig_slice is not None:
            card = kind.removesuffix("-mig")
            named = [f"gpu:{card}_{lease.mig_slice.profile}", f"gpu:{lease.mig_slice.profile}"]
            out[next((name for name in named if name in known), named[0])] += 1
        elif lease.charge < WHOLE:
            out |= _shards(known, kind, lease)
        else:
            out["gpu" if kind == "gpu" and "gpu:gpu" not in known else f"gpu:{kind}"] += 1
    for name in out:
        if name not in known:
            raise TerminalFailure("gres_unknown", f"{member.node.name} has no {name}")
    return ",".join(f"{name}:{count}" for name, count in sorted(out.items())), len(leases)


def _lines(member: AllocationMember) -> list[list[Any]]:
    return list((member.node.facts or {}).get("gres") or [])


def _type_of(uuid: str, node: str) -> str:
    kind, _dash, place = uuid.removeprefix(f"SLURM-{node}-").rpartition("-")
    if not uuid.startswith(f"SLURM-{node}-") or not place.isdecimal():
        raise TerminalFailure("gres_unknown", f"{uuid} is not a card that Slurm told of")
    return kind


def _shards(known: dict[str, int], kind: str, lease: Lease) -> Counter[str]:
    """A fraction as shards: its charge in shards of one card, rounded up."""
    name = f"shard:{kind}" if f"shard:{kind}" in known else "shard"
    per_card = known.get(name, 0) // max(1, known.get(f"gpu:{kind}", known.get("gpu", 1)))
    if per_card < 1:
        raise TerminalFailure("fractions_not_offered", f"{lease.gpu.node} has no shards: only whole cards")
    return Counter({name: -(-lease.charge * per_card // WHOLE)})


def share(member: AllocationMember, devices: int) -> tuple[int, int]:
    """CPUs and MiB on the member's node: as asked, else the part of the node that its cards are."""
    cards_there = sum(int(count) for name, _kind, count in _lines(member) if name == "gpu") or 1
    part = max(devices, 0) / max(cards_there, devices, 1) or 1 / 32
    cpus = (
        math.ceil(member.cpu_milli / 1000) if member.cpu_milli else int(member.node.cpu_milli / 1000 * part)
    )
    memory = member.memory_mib or int(member.node.memory_mib * 0.9 * part)
    return max(1, cpus), max(LEAST_MEMORY_MIB, memory)


def minutes_left(member: AllocationMember, at: datetime) -> int | None:
    """Slurm's limit for the job: to the lease's end and some slack, in minutes from ``at``; None: no end."""
    end = member.allocation.expires_at
    return None if end is None else max(1, math.ceil((end + SLACK - at) / timedelta(minutes=1)))


def job_order(
    members: Sequence[AllocationMember], cluster: Cluster, settings: SlurmSettings, at: datetime
) -> JobOrder:
    """The one job of all members. Raises `TerminalFailure` for what Slurm cannot carry: `nothing_to_run`,
    `folder_missing`, `shape_uneven` (members that take different things), and those of ``gres_of`` and the script."""
    first = members[0]
    allocation, request = first.allocation, first.allocation.request
    hold = request.run_kind == request.RunKind.HOLD
    image = request.image if request.run_kind == request.RunKind.IMAGE else ""
    if not hold and not request.command.strip() and not image:
        raise TerminalFailure("nothing_to_run", "the request has no command")
    if not settings.folder:
        raise TerminalFailure("folder_missing", f"{cluster.name} has no shared folder in its settings")
    asks = {gres_of(member) for member in members}
    shares = [share(member, next(iter(asks))[1]) for member in members]
    if len(asks) > 1:
        raise TerminalFailure("shape_uneven", "one Slurm job takes the same on each node")
    (gres, devices) = asks.pop()
    person = settings.submit_as == "person"
    user = allocation.holder.node_account if person else ""
    folder = f"{settings.folder}/work/{request.ref}-{request.uid.hex[-8:]}"
    script = batch_script(
        ScriptOrder(
            command=HOLD if hold else request.command,
            folder=folder,
            environment={str(name): str(value) for name, value in (request.environment or {}).items()},
            ours={
                **request_variables(request),
                "GPUPOOL_ALLOCATION": str(allocation.uid),
                "GPUPOOL_MEMBER": "0",
                "GPUPOOL_USER": allocation.holder.username,
                "GPUPOOL_WORKDIR": folder,
            },
            nodes=len(members),
            devices=devices,
            port=FIRST_PORT + allocation.pk % PORTS,
            image=image,
            image_runner=settings.image_runner,
        )
    )
    department = allocation.department.code
    return JobOrder(
        name=job_name(first),
        script=script,
        nodes=tuple(member.node.name for member in members),
        gres=gres,
        cpus=min(cpus for cpus, _memory in shares),
        memory_mib=min(memory for _cpus, memory in shares),
        minutes=minutes_left(first, at),
        folder=settings.folder,
        output=output_path(first, settings),
        account=settings.account_of(department),
        qos=settings.qos.get(department, settings.qos.get("*", "")),
        partition=settings.partition,
        reservation=settings.reservation,
        user=user,
        comment=f"{allocation.ref} {request.ref}",
    )


def output_path(member: AllocationMember, settings: SlurmSettings) -> str:
    """Where a job's output lies; one file for the whole gang."""
    return f"{settings.folder}/output/{member.allocation.uid}.log"
