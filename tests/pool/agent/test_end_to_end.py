"""A real agent against a real web process: enrol, report, run, stop, survive."""

from __future__ import annotations

import pytest

from pool.models import Gpu, Node
from tests.pool.agent.conftest import Process, Site, wait_for

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.serial]


def test_an_enrolled_agent_reports_its_machine_and_its_cards(online: Process, site: Site) -> None:
    node = Node.objects.get()
    assert node.name == "test-node" and node.cpu_milli >= 1000 and node.memory_mib > 0
    assert node.driver == "550.54.15" and node.cuda == "12.4" and node.run_as_root is not None
    assert [gpu.uuid for gpu in Gpu.objects.order_by("index")] == ["GPU-test-0", "GPU-test-1"]
    rows = wait_for(lambda: [m["rows"] for _, m in site.samples if m["rows"]])[0]
    assert {row[0]: row[3]["util"] for row in rows} == {"GPU-test-0": 10, "GPU-test-1": 20}
    assert online.status()["connected"] is True
