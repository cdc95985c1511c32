"""The dashboard file against what `/metrics` really gives: each metric, label and unit that a panel uses exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from prometheus_client.parser import text_string_to_metric_families

from monitoring.models import Finding, GpuEvent, MetricSource
from monitoring.selectors import metrics
from monitoring.services import ingest, intake
from portal.kernel.clock import now
from portal.ops.models import Incident
from portal.ops.services import incident_open
from tests.monitoring import builders as b

pytestmark = pytest.mark.django_db
DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "gpupool.json"
UNITS = {
    "_ratio": "percentunit",
    "_celsius": "celsius",
    "_watts": "watt",
    "_timestamp_seconds": "s",
    "_bytes": "percentunit",  # shown as used of total only
}
WORDS = {
    "sum",
    "avg",
    "min",
    "max",
    "by",
    "topk",
    "time",
    "vector",
    "increase",
    "ignoring",
    "and",
    "or",
    "on",
    "rate",
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    """Metric → its labels, of an installation where everything has happened once."""
    node = b.node("sh-h800-01", 1)
    card = node.gpus.get()
    batch, _ = intake.batch_of(node_id=node.pk, message=b.message(b.row(card, sm=40)))
    ingest.samples_write(batches=[batch])
    Finding.objects.create(kind="stranded", subject_key="s:1", gpu=card, subject_label="x", since=now())
    GpuEvent.objects.create(node=node, gpu=card, kind="xid", code=79, at=now())
    MetricSource.objects.create(
        name="dcgm", cluster=node.cluster, kind="exporter", url="http://x/", last_code="ok", last_ok_at=now()
    )
    incident_open(kind="xid", dedupe_key="x", severity=Incident.Severity.CRITICAL, subject=card, facts={})
    monkeypatch.setattr(metrics, "_kept", None)
    monkeypatch.setattr(metrics, "sweep_last", now)
    text = Client().get("/metrics").content.decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    yield found


def panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return made


def queries() -> Iterator[tuple[dict[str, Any], str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield panel, target["expr"], target.get("legendFormat", "")


def test_each_metric_and_label_of_the_dashboard_is_told(told: dict[str, set[str]]) -> None:
    wrong: list[str] = []
    for panel, text, legend in queries():
        names = re.findall(r"gpupool_\w+", text)
        assert names, panel["title"]
        labels: set[str] = set()
        for name, inside in re.findall(r"(gpupool_\w+)(?:\{([^}]*)\})?", text):
            if name not in told:
                wrong.append(f"{panel['title']}: {name} is not told")
            asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside))
            if asked - told.get(name, set()):
                wrong.append(f"{panel['title']}: {name} has no {sorted(asked - told.get(name, set()))}")
            labels |= told.get(name, set())
        grouped = {word for group in re.findall(r"(?:by|ignoring|on) \(([^)]*)\)|(?:ignoring|on)\((\w+)\)", text)
                   for part in group for word in part.replace(" ", "").split(",") if word}  # fmt: skip
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        if (grouped | shown) - labels:
            wrong.append(f"{panel['title']}: no label {sorted((grouped | shown) - labels)}")
        if "by (" in text and "topk" not in text and shown - grouped:
            wrong.append(f"{panel['title']}: {sorted(shown - grouped)} is summed away")
        left = set(re.findall(r"[a-z_]{2,}(?=\s*\()", text)) - WORDS
        if left:
            wrong.append(f"{panel['title']}: unknown function {sorted(left)}")
    assert wrong == []


def test_metrics_are_in_base_units(told: dict[str, set[str]]) -> None:
    """As `promtool check metrics` asks: seconds, bytes, ratios; counters end in `_total`."""
    scaled = re.compile(
        r"_(hours?|minutes?|days?|ms|milliseconds?|percent|[kmg]i?b|kilobytes|megabytes|milli)(_|$)"
    )
    assert [name for name in told if scaled.search(name)] == []
    assert {"gpupool_waste_gpu_seconds_total", "gpupool_xid_events_total"} <= set(told)


def test_cards_are_not_counted_again_by_their_instances() -> None:
    """A split card has rows of its own and of its instances: sums and means take the card's."""
    for panel, text, _legend in queries():
        for inside in re.findall(r"gpupool_gpu_\w+\{([^}]*)\}", text):
            assert 'slot="0"' in inside, panel["title"]


def test_units_are_those_of_the_metrics() -> None:
    for panel, text, _legend in queries():
        unit = panel["fieldConfig"]["defaults"]["unit"]
        expected = next((u for end, u in UNITS.items() if re.search(rf"gpupool_\w+{end}\b", text)), None)
        if re.search(r"/(?! 3600)", text):
            expected = "percentunit"
        assert unit == (expected or "short"), panel["title"]


def test_every_panel_asks_the_data_source_that_was_chosen() -> None:
    board = json.loads(DASHBOARD.read_text())
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert (variables["source"]["type"], variables["source"]["query"]) == ("datasource", "prometheus")
    assert variables["site"]["datasource"] == {"type": "prometheus", "uid": "${source}"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    used = set()
    for panel in board["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
        used |= {name for target in panel["targets"] for name in re.findall(r"\$(\w+)", target["expr"])}
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    assert used <= set(variables)
