"""A small month that a reader can check with a pencil.

Two cards H800 in Shanghai, in the pool from 1 May 2026 00:00. Price 10.00 a GPU-hour until 20 May 00:00, then 12.00.
Vision holds the whole first card 10 May 00:00 to 12 May 12:00 (60 h, 600.00) and half of the second one 20 May 06:00
to 18:00 (6 GPU·h, 72.00). Search holds the second card 31 May 22:00 to 1 June 02:00 (2 h = 24.00 in May, as much in
June). Telemetry: the first card works 12 hours of 10 May, rests 12; 11 May is unseen; 12 May it works half of each hour
until noon. The second card is down 15 May 00:00 to 16 May 00:00; its node is under maintenance 25 May 08:00 to 20:00
(both cards).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from monitoring.models import CardSpan, GpuRollup
from monitoring.services.card_states import card_states_sweep
from monitoring.services.day_sums import days_sum
from pool.models import Cluster, Gpu, Node, Site
from portal.kernel.clock import set_clock
from quotas.models import UsageSpan
from quotas.services.ledger import ledger_accrue, usage_span_close, usage_span_open
from tests.quotas.money.build import World, at, named, world

H = 3_600_000


@dataclass
class Story:
    """The world and its two cards."""

    w: World
    first: Gpu
    second: Gpu
    node: Node


def lease(
    w: World, card: Gpu, department: object, start: str, end: str | None, charge: int = 1000
) -> UsageSpan:
    request = w.request(department)  # type: ignore[arg-type]
    key = uuid.uuid4()
    with set_clock(at(start)):
        span = usage_span_open(
            key=key, request_id=request.pk, department_id=request.department_id, user_id=w.user.pk,
            flavour_id=w.flavour.pk, site_code="sh", node_name="n1", gpu_label=f"n1/{card.index}", gpu_uid=card.uid,
            charge_milli=charge, started_at=at(start),
        )  # fmt: skip
    if end:
        with set_clock(at(end)):
            span = usage_span_close(key=key, ended_at=at(end))
    return span


def hour(card: Gpu, start: datetime, busy_pm: int, covered_s: int = 3600) -> None:
    GpuRollup.objects.create(
        gpu_id=card.pk,
        step=3600,
        bucket=start,
        samples=360,
        covered_s=covered_s,
        util_n=360,
        util_sum=360 * busy_pm,
    )


def tell() -> Story:
    """The whole month, built by the services under a set clock; summed on 3 June."""
    w = world()
    site = Site.objects.create(code="sh", name="Shanghai")
    cluster = Cluster.objects.create(code="c1", name="c1", site=site)
    node = Node.objects.create(name="n1", cluster=cluster, health="ok")
    cards = [
        Gpu.objects.create(
            uuid=f"GPU-{i}", node=node, flavour=w.flavour, index=i, model_name="NVIDIA H800", memory_mib=81559
        )
        for i in range(2)
    ]
    Gpu.objects.update(created_at=at("2026-05-01T00:00"))
    named(w.vision, "Lab / Vision", at("2026-01-01T00:00"))
    named(w.search, "Lab / Search", at("2026-01-01T00:00"))
    first, second = cards
    with set_clock(at("2026-05-01T00:01")):
        assert card_states_sweep() == 2
    w.price("10", at("2026-05-01T00:00"))
    w.price("12", at("2026-05-20T00:00"))
    lease(w, first, w.vision, "2026-05-10T00:00", "2026-05-12T12:00")
    lease(w, second, w.vision, "2026-05-20T06:00", "2026-05-20T18:00", charge=500)
    lease(w, second, w.search, "2026-05-31T22:00", "2026-06-01T02:00")
    for n in range(24):
        hour(first, at("2026-05-10T00:00") + timedelta(hours=n), 1000 if n < 12 else 0)
        if n < 12:
            hour(first, at("2026-05-12T00:00") + timedelta(hours=n), 500)
    _broken(second, node)
    with set_clock(at("2026-06-03T09:00")):
        ledger_accrue()
        assert days_sum(limit=100) == 34
    return Story(w, first, second, node)


def _broken(card: Gpu, node: Node) -> None:
    """A fault that lasts a day, then a maintenance of the node, as the sweep sees them."""
    Gpu.objects.filter(pk=card.pk).update(condition="fault", condition_since=at("2026-05-15T00:00"))
    with set_clock(at("2026-05-15T00:05")):
        assert card_states_sweep() == 2
    Gpu.objects.filter(pk=card.pk).update(condition="ok", condition_since=at("2026-05-16T00:00"))
    with set_clock(at("2026-05-16T00:05")):
        assert card_states_sweep() == 2
        assert card_states_sweep() == 0
    for moment, state in (("2026-05-25T08:00", "maintenance"), ("2026-05-25T20:00", "open")):
        Node.objects.filter(pk=node.pk).update(schedulable=state, schedulable_since=at(moment))
        with set_clock(at(moment) + timedelta(minutes=1)):
            assert card_states_sweep() == 4
    assert CardSpan.objects.count() == 8
