"""Behaviours drawn from public bug reports about reports, each named by its id (behaviours.json)."""

from __future__ import annotations

import csv
import io
import re
from datetime import date
from typing import Any

import pytest
from django.db.models import Sum
from django.test import Client
from django.urls import reverse

from monitoring.models import CardDay
from monitoring.selectors.reports.kinds import KINDS
from monitoring.services.day_sums import days_sum
from pool.models import Node
from portal.kernel.clock import set_clock
from quotas.models import LedgerEntry
from tests.monitoring.reports.story import H, Story, tell
from tests.quotas.money.build import at, person

pytestmark = pytest.mark.django_db
NOW = at("2026-06-03T09:00")


@pytest.fixture
def story() -> Story:
    return tell()


@pytest.fixture
def finance() -> Client:
    client = Client()
    client.force_login(person("fin", ("finance", None)))
    client.cookies["django_language"] = "en"
    return client


def rows_of(client: Client, **params: str) -> list[dict[str, Any]]:
    with set_clock(NOW):
        query = "&".join(f"{name}={value}" for name, value in params.items())
        file = client.get(
            f"{reverse('monitoring:report-file', args=['utilization'])}?{query}&format=machines"
        )
    assert file.status_code == 200
    return list(csv.DictReader(io.StringIO(file.content.decode())))


def test_p028_a_lease_over_the_edge_of_two_months_is_cut_without_gap_or_overlap(
    story: Story, finance: Client
) -> None:
    """Two hours in May, two in June: the slices of the books touch, and each month's report has its part."""
    slices = []
    for month in ("2026-05", "2026-06"):
        with set_clock(NOW):
            file = finance.get(f"{reverse('quotas:month-file')}?for=machines&month={month}").content.decode()
        slices += [row for row in csv.DictReader(io.StringIO(file)) if row["department"] == "Lab / Search"]
    assert [(row["starts_at"], row["ends_at"], int(row["gpu_ms"])) for row in slices] == [
        ("2026-05-31T14:00:00+00:00", "2026-05-31T16:00:00+00:00", 2 * H),
        ("2026-05-31T16:00:00+00:00", "2026-05-31T18:00:00+00:00", 2 * H),
    ]
    [request] = {row["request"] for row in slices}
    for month in ("2026-05", "2026-06"):
        [part] = [
            row for row in rows_of(finance, by="lease", period=month) if row["group"].startswith(request)
        ]
        assert (int(part["allocated_gpu_ms"]), int(part["cost_micro"])) == (2 * H, 24_000_000)


def test_p029_nothing_divided_by_nothing_is_a_dash_and_null(story: Story, finance: Client) -> None:
    """A time before the pool had any card: no share of it is 0 %, infinite, or an error."""
    with set_clock(NOW):
        for kind in KINDS:
            period = "period=days&from=2024-02-29&to=2024-03-01"
            page = finance.get(f"{reverse('monitoring:report', args=[kind])}?{period}")
            api = finance.get(f"/api/v1/reports/{kind}/?{period}")
            assert (page.status_code, api.status_code) == (200, 200), kind
            text = re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", page.content.decode(), flags=re.S)
            assert not re.search(r"\b(NaN|nan|inf|Infinity|None)\b", text), kind
            for table in api.json()["tables"]:
                total = dict(zip(table["columns"], table["total"] or [], strict=False))
                shares = [value for name, value in total.items() if "share" in name or "percent" in name]
                assert all(value is None or value == "" for value in shares), (kind, total)
        usual = finance.get("/api/v1/reports/utilization/?period=2026-05").json()["tables"][0]
        assert any("share" in name for name in usual["columns"])


def test_p062_a_node_without_gpus_costs_nothing_and_stands_in_no_sum(story: Story, finance: Client) -> None:
    def sums() -> tuple[Any, ...]:
        of_days = CardDay.objects.aggregate(
            *(Sum(f"{name}_ms") for name in ("installed", "allocated", "down"))
        )
        of_lines = LedgerEntry.objects.aggregate(Sum("gpu_ms"), Sum("amount_micro"))
        return (*of_days.values(), *of_lines.values(), rows_of(finance, by="node", period="2026-05"))

    before = sums()
    Node.objects.create(name="login-1", cluster=story.node.cluster, health="ok", cpu_milli=64_000)
    CardDay.objects.filter(local_day=date(2026, 6, 2)).delete()
    with set_clock(NOW):
        days_sum(limit=100)
    assert sums() == before
