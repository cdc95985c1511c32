"""Queries and bytes of every main page, against a baseline kept in git and the budget of the product.

`tests/query_counts.json` holds the queries of each page on the demo's first stage. A rise needs its reason in the
commit that changes the file (`UPDATE_QUERY_COUNTS=1` writes it anew). No page may take more than 15 queries or
60 kB, also with a fleet of 1,213 nodes and 6,212 GPUs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from monitoring.models import MetricSource, SourceCard
from monitoring.selectors.board import board_forget
from monitoring.services.sources import source_result, source_save
from pool.models import Allocation, Gpu, Node
from pool.services.cycle import schedule_cycle
from pool.services.fleet_import import fleet_import, fleet_plan
from portal.accounts.models import User
from portal.demo.first import seed
from portal.kernel.clock import now
from portal.ops.actor import system
from quotas.models import ApprovalStep, CapacityRequest

pytestmark = pytest.mark.django_db(transaction=True)  # a scheduling cycle commits placement by placement
BASELINE = Path(__file__).with_name("query_counts.json")
TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
MOST_QUERIES = 15
MOST_BYTES = 60_000

PAGES: list[tuple[str, str]] = [
    ("lin.yue", "quotas:home"),
    ("lin.yue", "quotas:request-new"),
    ("lin.yue", "quotas:request-list"),
    ("lin.yue", "pool:leases"),
    ("lin.yue", "pool:home-allocations"),
    ("chen.hao", "quotas:approvals"),
    ("chen.hao", "quotas:quota-tree"),
    ("zhao.rui", "pool:operations"),
    ("zhao.rui", "pool:nodes"),
    ("zhao.rui", "monitoring:wall"),
    ("zhao.rui", "monitoring:waste"),
    ("zhao.rui", "monitoring:alert-rules"),
    ("zhao.rui", "monitoring:sources"),
    ("zhao.rui", "monitoring:source-new"),
    ("zhao.rui", "monitoring:gpu-compare"),
    ("zhao.rui", "accounts:people"),
    ("zhao.rui", "accounts:departments"),
    ("zhao.rui", "quotas:policy"),
    ("zhao.rui", "ops:incidents"),
    ("sun.mei", "quotas:finance-home"),
    ("sun.mei", "quotas:month"),
    ("sun.mei", "quotas:ledger"),
    ("sun.mei", "quotas:prices"),
    ("he.jing", "ops:audit"),
    ("he.jing", "quotas:month"),
    ("lin.yue", "notify:list"),
    ("lin.yue", "accounts:profile"),
]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[None]:
    """The demo's first stage, one cycle planned."""
    cache.clear()
    seed(tmp_path)
    schedule_cycle(cause="test")
    yield


def signed_in(username: str) -> Client:
    client = Client(headers={"accept-encoding": "identity"})
    client.force_login(
        User.objects.get(username=username), backend="django.contrib.auth.backends.ModelBackend"
    )
    return client


def measure(client: Client, address: str) -> tuple[int, int]:
    """(queries, bytes) of a second visit; the first warms what a running process has warm."""
    cache.clear()  # what is kept for seconds must not run out between the two visits
    board_forget()
    assert client.get(address).status_code == 200, address
    with CaptureQueriesContext(
        connection,
    ) as queries:
        response = client.get(address)
    assert response.status_code == 200
    if os.environ.get("SHOW_QUERIES"):
        print(address, *(q["sql"][:160] for q in queries), sep="\n   ")
    return len(queries), len(response.content)


def metric_source(node: Node, number: int) -> MetricSource:
    """A source that told of all cards of a node."""
    values = {"name": f"dcgm {number}", "kind": "exporter", "url": f"http://exporter-{number}:9400/metrics"}
    made = source_save(acting_user=system("test"), cluster=node.cluster, values=values)
    source_result(source_id=made.pk, code="ok", facts={"cards": 8, "problems": {"unknown": 2}})
    SourceCard.objects.bulk_create(
        SourceCard(source=made, gpu=card, seen_at=now(), workloads=[{"namespace": "ml", "pod": "train-0"}])
        for card in node.gpus.all()
    )
    return made


def details() -> list[tuple[str, str, Any]]:
    """Pages of single things, by who opens them."""
    asked = CapacityRequest.objects.filter(requester__username="lin.yue").order_by("id")[0]
    held = Allocation.objects.order_by("id")[0]
    step = ApprovalStep.objects.filter(state="open").order_by("id")[0]
    node = Node.objects.order_by("id")[0]
    told = [metric_source(node, n) for n in range(3)]
    return [
        ("lin.yue", "quotas:request-detail", asked.uid),
        ("zhao.rui", "pool:allocation", held.uid),
        ("zhao.rui", "monitoring:allocation-live", held.uid),
        ("zhao.rui", "monitoring:allocation-metrics", held.uid),
        ("zhao.rui", "pool:request-progress", held.request.uid),
        ("zhao.rui", "pool:node", node.uid),
        ("zhao.rui", "monitoring:node-live", node.uid),
        ("zhao.rui", "monitoring:source", told[0].uid),
        ("zhao.rui", "monitoring:source-edit", told[0].uid),
        ("zhao.rui", "monitoring:gpu", Gpu.objects.order_by("id")[0].uid),
        ("chen.hao", "quotas:approval-detail", step.uid),
    ]


def test_queries_of_pages_stay_at_their_baseline(demo: None) -> None:
    found: dict[str, int] = {}
    too_many: list[str] = []
    clients: dict[str, Client] = {}
    single = details()
    visits = [(who, name, reverse(name)) for who, name in PAGES]
    visits += [(who, name, reverse(name, args=[uid])) for who, name, uid in single]
    for who, name, address in visits:
        client = clients.setdefault(who, signed_in(who))
        queries, size = measure(client, address)
        found[f"{name} as {who}"] = queries
        if queries > MOST_QUERIES or size > MOST_BYTES:
            too_many.append(f"{name} as {who}: {queries} queries, {size} bytes")
    if os.environ.get("UPDATE_QUERY_COUNTS"):
        BASELINE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert too_many == []
    baseline = json.loads(BASELINE.read_text())
    rose = {k: (baseline.get(k), v) for k, v in found.items() if v > baseline.get(k, -1)}
    assert rose == {}, "more queries than the baseline: (baseline, now)"
    assert set(baseline) == set(found), "the baseline names other pages"


@pytest.mark.shared
@pytest.mark.skipif(not TRACES.exists(), reason="needs ../shared/traces")
def test_pages_stay_within_the_budget_with_a_fleet_of_6212_cards(demo: None) -> None:
    plan = fleet_plan(content=(TRACES / "nodes.csv").read_bytes(), filename="nodes.csv", default_site="openb")
    fleet_import(acting_user=system("test"), plan=plan)
    assert Gpu.objects.count() == 6212 + 64
    wrong: list[str] = []
    for who, address in (
        ("zhao.rui", reverse("pool:nodes")),
        ("zhao.rui", reverse("pool:operations")),
        ("zhao.rui", reverse("monitoring:wall")),
        ("zhao.rui", reverse("monitoring:wall") + "?view=table&site=openb"),
        ("lin.yue", reverse("quotas:request-new")),
        ("chen.hao", reverse("quotas:quota-tree")),
        ("lin.yue", reverse("quotas:home")),
    ):
        queries, size = measure(signed_in(who), address)
        if queries > MOST_QUERIES or size > MOST_BYTES:
            wrong.append(f"{address}: {queries} queries, {size} bytes")
    assert wrong == []
    content = signed_in("zhao.rui").get(reverse("pool:nodes")).content.decode()
    assert content.count('class="mono" href="/nodes/') == 50
