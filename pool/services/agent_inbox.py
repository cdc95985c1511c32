"""Messages of node agents, each taken in one transaction and counted once.

Durable messages come in order of their `seq`; a node's `last_seq` moves in the same transaction as what the
message changes, so one that was taken before is only acknowledged again. A message that makes no sense (an
unknown or another node's allocation) is logged and counted: it must not block those behind it.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from ipaddress import ip_address
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.db import DataError, IntegrityError, transaction
from django.db.models import Exists, OuterRef
from django.utils.dateparse import parse_datetime

from pool.locks import allocation_lock
from pool.models import (
    AgentCommand,
    AgentToken,
    Allocation,
    AllocationLog,
    AllocationMember,
    Gpu,
    Node,
    ReclaimCase,
)
from pool.selectors.agents import HEARTBEAT_SECONDS, sample_seconds
from pool.services.commands import START, STOP, command_send
from pool.services.conditions import gpu_condition_set, gpu_foreign_use_set
from pool.services.inventory_report import gpu_returned, gpu_vanished, inventory_sync
from pool.services.ladder import checkpoint_reported
from pool.services.member_reports import (
    AGENT,
    NOT_FREE,
    member_ended,
    member_free,
    member_running,
    member_starting,
)
from portal.kernel.clock import now
from portal.kernel.errors import DomainError, Refused
from portal.kernel.models import advance
from portal.ops.models import Incident
from portal.ops.outbox import outbox_add
from portal.ops.services.incidents import incident_open, incident_resolve

log = structlog.get_logger(__name__)
DURABLE = ("job", "log", "free", "event", "checkpoint")
LOG_LIMIT_BYTES = 8 * 1024 * 1024
ORPHAN_GRACE_S = 10
NONSENSE = (DataError, IntegrityError, DomainError, KeyError, TypeError, ValueError, AttributeError)
CLEARED_BY_ITSELF = f"{NOT_FREE}_processes"
FORGOTTEN_AFTER = timedelta(seconds=60)
WANTED = frozenset(
    {AllocationMember.State.RESERVED, AllocationMember.State.STARTING, AllocationMember.State.RUNNING}
)


def _time(value: Any, default: datetime | None = None) -> datetime | None:
    """An agent's ISO time; `default` where there is none or it is not one."""
    try:
        found = parse_datetime(str(value)) if value else None
    except ValueError:
        found = None
    return found if found is not None and found.tzinfo is not None else default


# -- hello and heartbeat --------------------------------------------------------------------------------


def agent_hello(*, node_id: int, message: dict[str, Any]) -> dict[str, Any]:
    """Take an agent's introduction: the node's facts, its cards, its jobs. Returns the welcome.

    Raises `Refused` (`token_of_another_node`) where the machine is not the one that was enrolled.
    """
    with transaction.atomic():
        # Without the key: other transactions write rows that name this node while they hold allocations.
        node = _locked(node_id)
        machine = str(message.get("machine_id") or "")[:64]
        foreign = bool(node.machine_id and machine != node.machine_id)
        if not foreign:
            _hello(node, message, machine)
            welcome = {
                "t": "welcome",
                "node_uid": str(node.uid),
                "heartbeat_s": HEARTBEAT_SECONDS,
                "sample_s": sample_seconds(node),
                "server_time": now().isoformat(),
                "accounts": {},
            }
    if foreign:
        incident_open(
            kind="agent_token_stolen",
            dedupe_key=f"agent_token_stolen:{node.uid}",
            severity=Incident.Severity.CRITICAL,
            subject=node,
            facts={"hostname": str(message.get("hostname"))[:120], "expected": node.hostname},
        )
        raise Refused(code="token_of_another_node", detail="This token was given to another machine.")
    with transaction.atomic():  # apart: allocations are locked before cards, everywhere
        _jobs_compare(node, message.get("jobs") or [], now())
    return welcome


def _locked(node_id: int) -> Node:
    rows = Node.objects.select_for_update(of=("self",), no_key=True).select_related("cluster")
    return rows.get(pk=node_id)


def _hello(node: Node, message: dict[str, Any], machine: str) -> None:
    at = now()
    facts = dict(message.get("facts") or {})
    run_as = message.get("run_as") or {}
    facts["otherwise_account"] = str(run_as.get("otherwise") or "")[:64]
    gpus = message.get("gpus") or []
    nvml = facts.get("nvml") or {}
    said = _time(message.get("now"))
    values: dict[str, Any] = {
        "machine_id": machine,
        "hostname": str(message.get("hostname") or node.hostname)[:255],
        "facts": facts,
        "os": str(facts.get("os") or "")[:120],
        "kernel": str(facts.get("kernel") or "")[:120],
        "driver": str(facts.get("driver") or "")[:32],
        "cuda": str(facts.get("cuda") or "")[:16],
        "run_as_root": bool(run_as.get("root")),
        "agent_user": str(run_as.get("user") or "")[:64],
        "agent_version": str(message.get("agent_version") or "")[:32],
        "boot_id": str(message.get("boot_id") or "")[:64],
        "clock_skew_ms": _skew(said, at),
    }
    if not node.address and not is_loopback(str(facts.get("address") or "")):
        values["address"] = str(facts["address"])[:255]  # where members of a gang reach each other
    for name in ("cpu_milli", "memory_mib"):
        if facts.get(name):
            values[name] = int(facts[name])
    nvml_ok = bool(nvml.get("ok"))
    if settings.GPUPOOL_DEMO and not node.simulated:
        values["test_only"] = not gpus and not Gpu.objects.filter(node=node).exists()
    advance(Node.objects.filter(pk=node.pk), **values)
    node.refresh_from_db()
    node_heard(node=node, at=at)
    inventory_sync(node=node, gpus=gpus, nvml_ok=nvml_ok)
    _nvml_state(node, nvml_ok, str(nvml.get("reason") or ""))


def is_loopback(address: str) -> bool:
    """Whether an address is of no use to other machines (also: none at all)."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return True


def _skew(said: datetime | None, at: datetime) -> int | None:
    """Milliseconds that the node's clock is ahead; None where it did not say."""
    if said is None:
        return None
    return max(-(2**31), min(2**31 - 1, round((said - at).total_seconds() * 1000)))


def _nvml_state(node: Node, ok: bool, reason: str) -> None:
    key = f"nvml_broken:{node.uid}"
    if ok:
        incident_resolve(dedupe_key=key, note="NVML answers again.")
    elif Gpu.objects.filter(node=node).exclude(condition=Gpu.Condition.RETIRED).exists():
        incident_open(kind="nvml_broken", dedupe_key=key, subject=node, facts={"reason": reason})


def node_heard(*, node: Node, at: datetime) -> None:
    """Stamp a sign of life; a node that was late, suspect, lost or never heard of is healthy again."""
    Node.objects.filter(pk=node.pk).update(last_heartbeat_at=at)
    before = node.health
    changed = advance(
        Node.objects.filter(pk=node.pk).exclude(health=Node.Health.OK), health=Node.Health.OK, health_since=at
    )
    if changed:
        outbox_add(
            "pool.node_state",
            {"node_uid": str(node.uid), "health": Node.Health.OK.value, "was": str(before)},
            key=node.name,
        )
        incident_resolve(dedupe_key=f"node_lost:{node.uid}", note="The agent is back.")


def agent_heartbeat(*, node_id: int, token_id: int) -> None:
    """A sign of life: one UPDATE unless the node's health changes with it.

    Raises `Refused` (`token_revoked`) where the token ended: a connection must not outlive it, poke or no poke.
    """
    valid = AgentToken.objects.filter(pk=token_id, node=OuterRef("pk"), revoked_at=None)
    if Node.objects.filter(Exists(valid), pk=node_id, health=Node.Health.OK).update(last_heartbeat_at=now()):
        return
    if not AgentToken.objects.filter(pk=token_id, node_id=node_id, revoked_at=None).exists():
        raise Refused(code="token_revoked", detail="This node's token was revoked.")
    with transaction.atomic():
        node_heard(node=_locked(node_id), at=now())


def agent_heartbeats(*, beats: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Signs of life of many nodes, as (node, token), in one transaction; returns those that are stamped.

    The others are for `agent_heartbeat`: a token that ended, a node whose health changes, one whose row is held
    elsewhere (rows are taken in order and none is waited for, so that groups never wait for one another).
    """
    with transaction.atomic():
        tokens = AgentToken.objects.filter(pk__in=[token for _, token in beats], revoked_at=None)
        valid = set(tokens.values_list("node_id", "pk")) & set(beats)
        rows = Node.objects.select_for_update(no_key=True, skip_locked=True).filter(health=Node.Health.OK)
        nodes = rows.filter(pk__in={node for node, _ in valid}).order_by("pk")
        taken = set(nodes.values_list("pk", flat=True))
        Node.objects.filter(pk__in=taken).update(last_heartbeat_at=now())
    return {beat for beat in valid if beat[0] in taken}


def _jobs_compare(node: Node, jobs: list[dict[str, Any]], at: datetime) -> None:
    """What the agent runs against what should run here: orphans are stopped, forgotten members have ended."""
    told = {(str(job.get("allocation")), int(job.get("member") or 0)): job for job in jobs}
    members = {
        (str(item.allocation.uid), item.number): item
        for item in AllocationMember.objects.filter(node=node)
        .exclude(allocation__state=Allocation.State.ENDED)
        .select_related("allocation")
    }
    for (uid, number), job in told.items():
        member = members.get((uid, number))
        if job.get("state") not in ("starting", "running") or (member is not None and member.state in WANTED):
            continue
        # Its allocation is over, or was given up while the node was away: it must not go on.
        allocation = member.allocation if member is not None else Allocation.objects.filter(uid=uid).first()
        log.warning("agent_orphan_job", node=node.name, allocation=uid)
        if allocation is not None:
            command_send(
                node=node,
                kind=STOP,
                allocation=allocation,
                member=number,
                payload={"grace_s": ORPHAN_GRACE_S, "signal": "SIGTERM"},
            )
    for key, member in members.items():
        job = told.get(key, {})
        if job.get("state") in ("starting", "running"):
            continue
        if member.state == AllocationMember.State.LOST:
            # The node is back and nothing runs there any more: the cards can be looked at.
            _ended(member, at, exit_code=job.get("exit_code"), error=None)
        elif not job and member.state in WANTED:
            taken = AgentCommand.objects.filter(
                allocation=member.allocation,
                member=member.number,
                kind=START,
                acked_at__lt=at - FORGOTTEN_AFTER,
            ).exists()
            if taken:
                detail = "The node no longer knows this job."
                error = {"code": "job_forgotten", "detail": detail, "retryable": True}
                _ended(member, at, exit_code=None, error=error)


def _ended(
    member: AllocationMember, at: datetime, exit_code: int | None, error: dict[str, Any] | None
) -> None:
    """An end that is concluded rather than told; the allocation's row is locked first, as everywhere."""
    allocation_lock(member.allocation_id)
    member_ended(member=member, at=at, exit_code=exit_code, signal=None, error=error, failed_start=False)


# -- durable messages -----------------------------------------------------------------------------------


def agent_message(*, node_id: int, message: dict[str, Any]) -> bool:
    """Take one durable message. False when it was taken before.

    One that cannot be taken whatever one does (nonsense in it) opens an incident and counts as taken: it must not
    block those behind it. A database that is away raises, and the message comes again.
    """
    seq = int(message["seq"])
    kind = str(message["t"])
    with transaction.atomic():
        # Whatever comes is a sign of life: a heartbeat may stand behind a long backlog.
        fresh = Node.objects.filter(pk=node_id, last_seq__lt=seq).update(
            last_seq=seq, last_heartbeat_at=now()
        )
        if not fresh:
            return False
        node = Node.objects.get(pk=node_id)
        take = {"job": _job, "log": _log, "free": _free, "event": _event, "checkpoint": _checkpoint}[kind]
        try:
            with transaction.atomic():
                take(node, message)
        except NONSENSE as error:
            log.warning("agent_message_bad", node=node.name, kind=kind, error=repr(error)[:300])
            incident_open(
                kind="agent_message_bad",
                dedupe_key=f"agent_message_bad:{node.uid}",
                subject=node,
                facts={"kind": kind, "seq": seq, "error": repr(error)[:300]},
            )
    return True


def _member(node: Node, message: dict[str, Any]) -> AllocationMember | None:
    """The member that a message is about, locked after its allocation; None where it is not this node's."""
    try:
        uid = UUID(str(message["allocation"]))
        number = int(message.get("member") or 0)
    except (ValueError, KeyError, TypeError):
        log.warning("agent_bad_message", node=node.name, kind=message.get("t"))
        return None
    found = Allocation.objects.filter(uid=uid).values_list("pk", flat=True).first()
    if found is None:
        log.warning("agent_unknown_allocation", node=node.name, kind=message.get("t"))
        return None
    allocation = allocation_lock(found)
    member = (
        AllocationMember.objects.select_for_update(no_key=True)
        .filter(allocation=allocation, node=node, number=number)
        .first()
    )
    if member is None:
        log.warning("agent_foreign_allocation", node=node.name, allocation=str(allocation.uid))
        return None
    member.allocation = allocation
    return member


def _job(node: Node, message: dict[str, Any]) -> None:
    member = _member(node, message)
    if member is None:
        return
    state = message.get("state")
    at = now()
    if state == "starting":
        member_starting(member=member)
    elif state == "running":
        member_running(
            member=member,
            at=_time(message.get("started_at"), at) or at,
            pid=message.get("pid"),
            account=str(message.get("account") or "")[:64],
        )
    elif state in ("exited", "failed_start"):
        member_ended(
            member=member,
            at=_time(message.get("ended_at"), at) or at,
            exit_code=message.get("exit_code"),
            signal=message.get("signal"),
            error=message.get("error"),
            failed_start=state == "failed_start",
        )


def _log(node: Node, message: dict[str, Any]) -> None:
    """A piece of output: nothing to lock, as pieces are unique by their offset and change nothing else."""
    uid, number, offset = (
        UUID(str(message["allocation"])),
        int(message.get("member") or 0),
        int(message["offset"]),
    )
    members = AllocationMember.objects.filter(allocation__uid=uid, number=number, node=node)
    allocation_id = members.values_list("allocation_id", flat=True).first()
    if allocation_id is None:
        log.warning("agent_foreign_allocation", node=node.name, allocation=str(uid))
    elif 0 <= offset < LOG_LIMIT_BYTES:
        text = str(message.get("data") or "").replace("\0", "\ufffd")
        piece = AllocationLog(allocation_id=allocation_id, member=number, offset=offset, data=text, at=now())
        AllocationLog.objects.bulk_create([piece], ignore_conflicts=True)


def _free(node: Node, message: dict[str, Any]) -> None:
    member = _member(node, message)
    if member is None:
        return
    found = message.get("gpus") or {}
    member_free(member=member, at=now(), found={str(uuid): dict(item) for uuid, item in found.items()})


def _checkpoint(node: Node, message: dict[str, Any]) -> None:
    """How a checkpoint went that the ladder had asked for."""
    member = _member(node, message)
    if member is None:
        return
    case = ReclaimCase.objects.filter(uid=UUID(str(message["case"])), allocation=member.allocation_id).first()
    if case is not None:
        code = message.get("exit_code")
        checkpoint_reported(
            case_id=case.pk,
            member=member.number,
            ok=bool(message.get("ok")),
            detail=str(message.get("detail") or ""),
            exit_code=code if isinstance(code, int) else None,
        )


def _event(node: Node, message: dict[str, Any]) -> None:
    """An event of a card. What it means for health is monitoring's to judge: it hears of it by the outbox."""
    kind = str(message.get("kind") or "")[:32]
    data = dict(message.get("data") or {})
    uuid = message.get("gpu_uuid")
    gpu = Gpu.objects.filter(node=node, uuid=str(uuid)).first() if uuid else None
    at = _time(message.get("at"), now()) or now()
    if kind == "nvml_broken":
        _nvml_state(node, False, str(data.get("reason") or ""))
    elif gpu is not None and kind == "gpu_lost":
        gpu_vanished(gpu=gpu)
    elif gpu is not None and kind == "gpu_back":
        gpu_returned(gpu=gpu)
    elif gpu is not None and kind in ("foreign_process", "foreign_gone"):
        kept = [item for item in gpu.foreign_use if item.get("pid") != data.get("pid")]
        if kind == "foreign_process":
            process = {name: data.get(name) for name in ("pid", "name", "user", "mem_mib")}
            kept.append(process | {"since": at.isoformat()})
        gpu_foreign_use_set(gpu=gpu, processes=kept[-50:])
        if not kept and gpu.condition == Gpu.Condition.SUSPECT and gpu.condition_reason == CLEARED_BY_ITSELF:
            gpu_condition_set(acting_user=AGENT, gpu=gpu, condition=Gpu.Condition.OK)
    outbox_add(
        "pool.agent_event",
        {
            "node_uid": str(node.uid),
            "gpu_uid": str(gpu.uid) if gpu is not None else None,
            "gpu_uuid": str(uuid) if uuid else None,
            "kind": kind,
            "at": at.isoformat(),
            "data": data,
        },
        key=str(uuid or node.uid),
    )
