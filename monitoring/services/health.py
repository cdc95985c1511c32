"""Judge cards, nodes and telemetry sources by what was heard last: incidents open once, collect, and close where they
may by themselves.

What a person has to clear (uncorrectable errors, a failed remap) stays until a person clears the card's condition.
Cordons are people's; what is judged here sets a condition, so that nothing new is placed on the card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.models import F, Max
from django.utils.dateparse import parse_datetime

from monitoring.engine.health import OK, Problem, Reading, counters_of, odd_ones, problems_of
from monitoring.engine.samples import LIVE_MS
from monitoring.models import CardHealth, GpuState, MetricSource
from monitoring.selectors.sources import silent_since
from pool.models import Gpu, Node
from pool.services.conditions import gpu_condition_set
from portal.kernel.clock import now
from portal.ops.actor import system
from portal.ops.models import Incident
from portal.ops.services.incidents import incident_open, incident_resolve

ACTOR = system("health")
_LOCK = 7_301_013
FRESH = timedelta(minutes=5)
SKEW_MS, SKEW_BAD_MS = 2_000, 60_000
RANK = {OK: 0, "suspect": 1, "fault": 2}


def health_judge() -> dict[str, int]:
    """Judge cards with a fresh sample, nodes and sources; returns problems begun and ended. One run at a time."""
    done = {"begun": 0, "ended": 0, "nodes": 0, "sources": 0}
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_LOCK])
            if not cursor.fetchone()[0]:
                return done
        at = now()
        states = (
            GpuState.objects.filter(slot=0, at__gt=at - FRESH)
            .select_related("gpu__node")
            .exclude(gpu__condition=Gpu.Condition.RETIRED)
            .order_by("gpu_id")
        )
        known = CardHealth.objects.in_bulk()
        due = _links_due()
        for state in states:
            row = known.get(state.gpu_id)
            if row is not None and row.at >= state.at:
                continue
            begun, ended = _judge(state, row, due.get((state.gpu.node_id, state.gpu.model_name)), at)
            done["begun"] += begun
            done["ended"] += ended
        done["nodes"] = _nodes()
        done["sources"] = _sources()
    return done


def _links_due() -> dict[tuple[int, str], int]:
    """(node, model) → the NVLinks that most of its cards of that model have up; only where at least two say so."""
    counts: dict[tuple[int, str], Counter[int]] = {}
    for node_id, model, nvlink in Gpu.objects.exclude(condition=Gpu.Condition.RETIRED).values_list(
        "node_id", "model_name", "nvlink"
    ):
        links = (nvlink or {}).get("links")
        if isinstance(links, int):
            counts.setdefault((node_id, model), Counter())[links] += 1
    return {key: max(found) for key, found in counts.items() if found[max(found)] >= 2}


def _judge(state: GpuState, row: CardHealth | None, links_due: int | None, at: datetime) -> tuple[int, int]:
    card = state.gpu
    links = (card.nvlink or {}).get("links")
    reading = Reading(
        more=state.more,
        missing=state.missing,
        throttle=state.throttle,
        activity_pm=state.sm_pm if state.sm_pm is not None else state.util_pm,
        temp_c=state.temp_c,
        links=links if isinstance(links, int) else None,
    )
    before = row.problems if row is not None else {}
    seen = problems_of(reading, row.counters if row is not None else {}, links_due)
    keep: dict[str, str] = {}
    begun = 0
    for problem in seen:
        since = parse_datetime(str(before.get(problem.code, ""))) or state.at
        keep[problem.code] = since.isoformat()
        if state.at - since < timedelta(seconds=problem.after_s):
            continue
        begun += _raise(card, problem, since)
    for code in sorted(set(before) - set(keep)):
        if _lasting(code):
            keep[code] = before[code]
    cleared = card.condition == Gpu.Condition.OK
    for code in [code for code in keep if _lasting(code) and code not in {p.code for p in seen}]:
        if cleared:  # a person declared the card healthy
            del keep[code]
    ended = _resolve(card, sorted(set(before) - set(keep)), keep)
    counters = counters_of(state.more)
    if row is None:
        CardHealth.objects.create(gpu=card, at=state.at, counters=counters, problems=keep)
    else:
        row.at, row.counters, row.problems = state.at, counters, keep
        row.save()
    return begun, ended


def _lasting(code: str) -> bool:
    return code == "gpu_ecc"


def _key(card: Gpu, code: str) -> str:
    return f"{code}:{card.uid}"


def _raise(card: Gpu, problem: Problem, since: datetime) -> int:
    """The incident, and the condition where it is worse than the one the card has; 1 when it was opened now."""
    facts = {
        "node": card.node.name,
        "index": card.index,
        "since": since.isoformat(),
        **problem.facts,
    }
    key = _key(card, problem.code)
    fresh = not Incident.objects.filter(dedupe_key=key).exclude(state="closed").exists()
    if fresh or problem.latched:
        incident_open(kind=problem.code, dedupe_key=key, severity=problem.severity, subject=card, facts=facts)
    if fresh and RANK[problem.condition] > RANK.get(card.condition, 3):
        gpu_condition_set(
            acting_user=ACTOR, gpu=card, condition=problem.condition, reason=problem.code, facts=facts
        )
    return int(fresh)


def _resolve(card: Gpu, codes: Iterable[str], keep: Mapping[str, str]) -> int:
    """What is no longer seen: its incident closes, and the card is healthy again if only this spoke against it."""
    ended = 0
    for code in codes:
        ended += incident_resolve(dedupe_key=_key(card, code), note="no longer seen")
        if card.condition == Gpu.Condition.SUSPECT and card.condition_reason == code and not keep:
            gpu_condition_set(acting_user=ACTOR, gpu=card, condition=Gpu.Condition.OK)
    return ended


def _nodes() -> int:
    """Clocks that run wrong, and drivers that differ from those of a node's group (cluster and card model)."""
    nodes = list(
        Node.objects.exclude(schedulable=Node.Schedulable.RETIRED)
        .exclude(health__in=[Node.Health.UNKNOWN, Node.Health.LOST])
        .order_by("id")
    )
    found = 0
    leads = _leads()
    for node in nodes:
        skew = abs(node.clock_skew_ms or 0)
        if -LIVE_MS < (node.clock_skew_ms or 0) < 0 and leads.get(node.pk, 0) > -SKEW_MS:
            # Its greeting came late, not its clock; without samples (no cards) nothing tells the two apart
            skew = 0
        found += _problem(
            node,
            "node_clock",
            skew >= SKEW_MS,
            Incident.Severity.CRITICAL if skew >= SKEW_BAD_MS else Incident.Severity.WARNING,
            {"skew_ms": node.clock_skew_ms},
        )
    model_of = dict(Gpu.objects.order_by("-id").values_list("node_id", "model_name"))
    groups: dict[tuple[int, str], dict[int, str]] = {}
    for node in nodes:
        groups.setdefault((node.cluster_id, model_of.get(node.pk, "")), {})[node.pk] = node.driver
    odd: dict[int, str] = {}
    for (_cluster, model), drivers in groups.items():
        if model:
            odd |= odd_ones(drivers)
    for node in nodes:
        usual = odd.get(node.pk)
        facts = {"driver": node.driver, "usual": usual or ""}
        found += _problem(node, "node_driver", usual is not None, Incident.Severity.WARNING, facts)
    return found


def _leads() -> dict[int, int]:
    """Node → by how much its newest samples were ahead of their arrival, ms. A clock is never further behind than that:
    a busy network or server only makes it less."""
    fresh = GpuState.objects.filter(at__gt=now() - FRESH).values_list("gpu__node_id")
    leads = fresh.annotate(lead=Max(F("at") - F("received_at")))
    return {node: round(lead / timedelta(milliseconds=1)) for node, lead in leads}


def _sources() -> int:
    """Sources that have been silent for too long; one that is switched off or well again has no incident."""
    found = 0
    for source in MetricSource.objects.select_related("cluster").order_by("id"):
        since = silent_since(source)
        facts = {
            "cluster": source.cluster.name,
            "fetch": source.last_code,
            "since": since.isoformat() if since else "",
            "good_at": source.last_ok_at.isoformat() if source.last_ok_at else "",
        }
        found += _problem(source, "source_silent", since is not None, Incident.Severity.WARNING, facts)
    return found


def _problem(
    subject: Node | MetricSource, code: str, wrong: bool, severity: str, facts: dict[str, Any]
) -> int:
    key = f"{code}:{subject.uid}"
    open_now = Incident.objects.filter(dedupe_key=key).exclude(state="closed").exists()
    if not wrong:
        if open_now:
            incident_resolve(dedupe_key=key, note="no longer seen")
        return 0
    if open_now:
        return 0
    incident_open(kind=code, dedupe_key=key, severity=severity, subject=subject, facts=facts)
    return 1
