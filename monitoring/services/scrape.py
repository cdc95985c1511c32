"""Fetch a source and write what it says: fetch, parse, identify, write, events. Bounded in time, size and threads."""

from __future__ import annotations

import time
import urllib.parse
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import structlog
from django.db import transaction

from monitoring.engine.samples import ACCEPT_FUTURE_MS
from monitoring.models import GpuState, MetricSource, SourceCard
from monitoring.services.events import gpu_event_record
from monitoring.services.ingest import Batch, Row, samples_write
from monitoring.services.partitions import oldest_kept
from monitoring.services.sources import credential_name, source_result
from monitoring.sources import dcgm, prometheus, smi_exporter, text
from monitoring.sources.fetch import Fetched, fetch
from monitoring.sources.reading import Metric, Reading, Scrape, sample_of
from pool.executors.base import TerminalFailure
from pool.models import Gpu, Node
from pool.services.credentials import credential_read
from portal.kernel.clock import now
from portal.kernel.units import to_ms
from portal.ops.models import Incident
from portal.ops.services import incident_open

log = structlog.get_logger(__name__)
THREADS = 16
BUDGET_S = 25.0
FRESH = timedelta(seconds=90)
RANK = {"agent": 0, "exporter": 1, "prometheus": 2}


@dataclass(frozen=True)
class Target:
    """One address to fetch; `node` is whose cards it tells of, None for an address for many nodes."""

    url: str
    node: Node | None


Claims = dict[str, list[tuple[Target, Scrape]]]


def source_scrape(*, source_id: int) -> dict[str, Any]:
    """Fetch one source now; returns the facts that are also kept with it. A failure is a result, not an exception."""
    source = MetricSource.objects.select_related("cluster").get(pk=source_id)
    began = time.monotonic()
    try:
        secret = secret_of(source)
    except TerminalFailure as error:
        source_result(source_id=source.pk, code=error.code, facts={})
        return {"code": error.code}
    targets = targets_of(source)
    at = now()
    scrapes, codes = heard(source, targets, secret)
    written = _write(source, scrapes, at)
    code = verdict(codes, len(targets), scrapes)
    facts: dict[str, Any] = {
        "targets": len(targets),
        "codes": dict(+codes),
        "ms": round((time.monotonic() - began) * 1000),
        **written,
    }
    source_result(source_id=source.pk, code=code, facts=facts)
    return {"code": code, **facts}


def heard(
    source: MetricSource, targets: list[Target], secret: str
) -> tuple[list[tuple[Target, Scrape]], Counter[str]]:
    """What the targets say, as far as it can be read, and how many of them answered how."""
    answers = _fetch_all(source, targets, secret)
    codes = Counter(answer.code or "ok" for _, answer in answers)
    codes["timeout"] += len(targets) - len(answers)
    scrapes: list[tuple[Target, Scrape]] = []
    for target, answer in answers:
        if answer.readable:
            try:
                scrapes.append((target, parse(source, answer)))
            except prometheus.BadAnswer as error:
                codes[error.code] += 1
                codes[answer.code or "ok"] -= 1
    return scrapes, +codes


def secret_of(source: MetricSource) -> str:
    """The token or password of a source; raises `TerminalFailure` where it has to be entered (again)."""
    if source.auth == MetricSource.Auth.NONE:
        return ""
    found = credential_read(cluster=source.cluster, name=credential_name(source))
    if found is None:
        raise TerminalFailure("secret_missing", source.name)
    return found


def verdict(codes: Counter[str], targets: int, scrapes: list[tuple[Target, Scrape]]) -> str:
    """`ok` where every target answered well and tells of cards, else the code that is worth a look first."""
    if not targets:
        return "no_targets"
    if codes["ok"] == targets:
        return "ok" if any(scrape.readings for _target, scrape in scrapes) else "empty"
    order = (
        "unauthorized",
        "too_large",
        "query_refused",
        "bad_json",
        "bad_shape",
        "refused",
        "unreachable",
        "timeout",
    )
    return next((code for code in order if codes[code]), "cut")


def targets_of(source: MetricSource) -> list[Target]:
    """The addresses of a source: one, or one for each node of its cluster that is in use."""
    if source.kind == MetricSource.Kind.PROMETHEUS:
        query = urllib.parse.urlencode({"query": source.query or prometheus.DEFAULT_QUERY})
        return [Target(f"{source.url.rstrip('/')}/api/v1/query?{query}", None)]
    if "{" not in source.url:
        return [Target(source.url, None)]
    nodes = Node.objects.filter(cluster=source.cluster).exclude(schedulable=Node.Schedulable.RETIRED)
    found = []
    for node in nodes.order_by("name"):
        address = node.address or node.hostname or node.name
        if ":" in address and not address.startswith("["):
            address = f"[{address}]"
        found.append(Target(source.url.replace("{node}", node.name).replace("{address}", address), node))
    return found


def _fetch_all(source: MetricSource, targets: list[Target], secret: str) -> list[tuple[Target, Fetched]]:
    """Every target's answer, at most sixteen at a time; those not there in time are left out."""

    def one(target: Target) -> tuple[Target, Fetched]:
        return target, fetch(target.url, auth=source.auth, username=source.username, secret=secret)

    if len(targets) == 1:
        return [one(targets[0])]
    pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="scrape")
    try:
        done, _ = wait([pool.submit(one, target) for target in targets], timeout=BUDGET_S)
        return sorted((future.result() for future in done), key=lambda answer: answer[0].url)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def parse(source: MetricSource, answer: Fetched) -> Scrape:
    """The readings of one answer; raises `BadAnswer` where a Prometheus server gave none."""
    into = Scrape()
    from_server = source.kind == MetricSource.Kind.PROMETHEUS
    if from_server:
        found: Iterable[Metric] = prometheus.metrics(answer.body, into.problems)
    else:
        body = answer.body.decode("utf-8", "replace")
        found = text.metrics(body, into.problems, complete=answer.code != "cut")
    series = list(found)
    dcgm.scrape((m for m in series if m.name[:4].lower() == "dcgm"), into, target_labels=from_server)
    dcgm.settle(into)
    smi_exporter.scrape((m for m in series if m.name.startswith(smi_exporter.PREFIX)), into)
    return into


def claims_of(scrapes: list[tuple[Target, Scrape]]) -> tuple[Claims, Counter[str]]:
    """UUID → who tells of it; and what was wrong with the lines."""
    problems: Counter[str] = Counter()
    claims: Claims = {}
    for target, scrape in scrapes:
        problems.update(scrape.problems)
        for uuid in {uuid for uuid, _ in scrape.readings}:
            claims.setdefault(uuid, []).append((target, scrape))
    return claims, problems


def _write(source: MetricSource, scrapes: list[tuple[Target, Scrape]], at: datetime) -> dict[str, Any]:
    claims, problems = claims_of(scrapes)
    gpus = identified(source, claims)
    covered = covered_by_better([gpu.pk for gpu in gpus.values()], source.kind, at)
    batches: dict[int, Batch] = {}
    seen: list[tuple[Gpu, Reading]] = []
    now_ms, oldest_ms = to_ms(at), to_ms(oldest_kept())
    for uuid, told in sorted(claims.items()):
        gpu = gpus.get(uuid)
        if gpu is None:
            problems["unknown"] += 1
            continue
        mine = _rightful(source, gpu, uuid, told, problems)
        if mine is None:
            continue
        if gpu.pk in covered:
            problems["covered"] += 1
            continue
        rows = []
        for (other, instance), reading in mine.readings.items():
            if other != uuid:
                continue
            total = gpu.memory_mib if instance is None else None
            sample = sample_of(reading, at_ms=now_ms, source=source.kind, total_mib=total)
            if sample.at_ms > now_ms + ACCEPT_FUTURE_MS or sample.at_ms < oldest_ms:
                problems["future" if sample.at_ms > now_ms else "too_old"] += 1
                continue
            rows.append(Row(gpu.pk, 0 if instance is None else instance + 1, sample))
        if rows:
            batches.setdefault(gpu.node_id, Batch(node_id=gpu.node_id)).rows.extend(rows)
            seen.append((gpu, mine.readings[uuid, None]))
    new = samples_write(batches=list(batches.values())) if batches else 0
    xids = _remember(source, seen, at)
    return {
        "cards": len(seen),
        "rows": sum(len(batch.rows) for batch in batches.values()),
        "new": new,
        "xids": xids,
        "problems": dict(+problems),
    }


def identified(source: MetricSource, claims: Claims) -> dict[str, Gpu]:
    """UUID as heard → card. Clusters that tell no UUIDs (Kubernetes, Slurm, an imported list) have made-up ones in the
    inventory: such a card is met by node and index once, and by its UUID from then on, also after indexes changed."""
    found = {gpu.uuid: gpu for gpu in Gpu.objects.select_related("node").filter(uuid__in=claims)}
    strangers = sorted(claims.keys() - found.keys())
    if not strangers:
        return found
    learned = {
        row.uuid: row.gpu
        for row in SourceCard.objects.select_related("gpu__node").filter(source=source).exclude(uuid="")
    }
    made_up = (
        Gpu.objects.select_related("node")
        .filter(node__cluster=source.cluster)
        .exclude(uuid__startswith="GPU-")
    )
    places = {
        (place, gpu.index): gpu for gpu in made_up for place in {gpu.node.name, gpu.node.hostname} - {""}
    }
    taken = {gpu.pk for uuid, gpu in learned.items() if uuid in claims}
    for uuid in strangers:
        gpu = learned.get(uuid)
        if gpu is None or not _still_there(gpu, claims[uuid]):
            place = _placed(uuid, claims[uuid], places)
            if place is not None and place.pk not in taken:
                gpu = place  # new here, or moved here from a node that tells of it no longer
        if gpu is not None:
            found[uuid] = gpu
            taken.add(gpu.pk)
    return found


def _still_there(gpu: Gpu, told: list[tuple[Target, Scrape]]) -> bool:
    """Whether the card's own node is among those that tell of it."""
    return any(target.node is None or target.node.pk == gpu.node_id for target, _ in told)


def _placed(uuid: str, told: list[tuple[Target, Scrape]], places: dict[tuple[str, int], Gpu]) -> Gpu | None:
    """The made-up card at the node and index that are told for it; one that is split only where that one is."""
    for target, scrape in told:
        card = scrape.readings.get((uuid, None))
        if card is None or card.index is None:
            continue
        hosts = {target.node.name} if target.node is not None else card.hosts
        split = any(heard == uuid and instance is not None for heard, instance in scrape.readings)
        for host in sorted(hosts):
            gpu = places.get((host, card.index))
            if gpu is not None and gpu.mig_enabled == split:
                return gpu
    return None


def covered_by_better(gpu_ids: list[int], kind: str, at: datetime) -> set[int]:
    """Cards that a better source reports now: those are left to it."""
    better = [name for name, rank in RANK.items() if rank < RANK[kind]]
    states = GpuState.objects.filter(gpu_id__in=gpu_ids, slot=0, source__in=better, at__gt=at - FRESH)
    return set(states.values_list("gpu_id", flat=True))


def rightful(
    source: MetricSource, gpu: Gpu, uuid: str, told: list[tuple[Target, Scrape]]
) -> tuple[Scrape | None, list[str]]:
    """The scrape that may speak for a card: of its own node, or of its cluster where an address has many nodes; and
    who else claims the card."""
    own = [scrape for target, scrape in told if target.node is not None and target.node.pk == gpu.node_id]
    shared = [
        scrape for target, scrape in told if target.node is None and gpu.node.cluster_id == source.cluster_id
    ]
    others = sorted(
        {target.node.name for target, _ in told if target.node is not None and target.node.pk != gpu.node_id}
    )
    for scrape in shared:
        hosts = set().union(*(r.hosts for (heard, _), r in scrape.readings.items() if heard == uuid))
        if len(hosts) > 1:
            others += sorted(hosts - {gpu.node.name, gpu.node.hostname})
            if not hosts & {gpu.node.name, gpu.node.hostname}:
                shared = []
    return next(iter(own or shared), None), others


def _rightful(
    source: MetricSource, gpu: Gpu, uuid: str, told: list[tuple[Target, Scrape]], problems: Counter[str]
) -> Scrape | None:
    """As `rightful`; a card that others claim too is an incident."""
    mine, others = rightful(source, gpu, uuid, told)
    if others:
        incident_open(
            kind="gpu_uuid_twice",
            dedupe_key=f"gpu_uuid_twice:{uuid}:source:{source.pk}",
            severity=Incident.Severity.CRITICAL,
            subject=gpu.node,
            facts={"uuid": uuid, "reported_by": ", ".join(others)[:200], "belongs_to": gpu.node.name},
        )
    if mine is None:
        problems["foreign"] += 1
    return mine


def _remember(source: MetricSource, seen: list[tuple[Gpu, Reading]], at: datetime) -> int:
    """Keep what was said of XIDs and workloads, and record each XID that is new; returns how many.

    An exporter's count in its window that rose is an event; else a gauge that changed. The gauge is never cleared and
    holds the last code only, so one that stood there at the first look is no event (pitfall P16).
    """
    if not seen:
        return 0
    events: list[dict[str, Any]] = []
    with transaction.atomic():
        MetricSource.objects.select_for_update(no_key=True).get(pk=source.pk)
        before = {row.gpu_id: row for row in SourceCard.objects.filter(source=source)}
        rows = []
        for gpu, reading in seen:
            last = before.get(gpu.pk)
            for code in _new_xids(reading, last):
                events.append(
                    {
                        "node_uid": str(gpu.node.uid),
                        "gpu_uuid": gpu.uuid,
                        "kind": "xid",
                        "at": at.isoformat(),
                        "data": {"xid": code, "reason": source.kind},
                    }
                )
            counts = {str(code): count for code, count in reading.xid_counts.items()}
            rows.append(
                SourceCard(
                    source=source,
                    gpu=gpu,
                    uuid="" if gpu.uuid == reading.gpu_uuid else reading.gpu_uuid,
                    seen_at=at,
                    xid=reading.xid,
                    xid_counts=counts,
                    workloads=reading.workloads[:20],
                )
            )
        for row in rows:
            last = before.get(row.gpu_id)
            if row.uuid and (last is None or last.uuid != row.uuid):
                SourceCard.objects.filter(source=source, uuid=row.uuid).update(uuid="")
        SourceCard.objects.bulk_create(
            rows,
            update_conflicts=True,
            unique_fields=["source", "gpu"],
            update_fields=["uuid", "seen_at", "xid", "xid_counts", "workloads"],
        )
    for payload in events:
        gpu_event_record(payload)
    return len(events)


def _new_xids(reading: Reading, last: SourceCard | None) -> list[int]:
    known = last.xid_counts if last is not None else {}
    counted = [code for code, count in reading.xid_counts.items() if count > known.get(str(code), 0)]
    changed = last is not None and reading.xid and reading.xid != (last.xid or 0)
    if changed and reading.xid is not None and reading.xid not in reading.xid_counts:
        counted.append(reading.xid)
    return sorted(counted)
