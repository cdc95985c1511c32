"""The pages of Slurm and Kubernetes clusters: what runs there, and quotas compared before they are pushed."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
from django.urls import reverse
from playwright.sync_api import Page, expect

from pool.executors import base
from pool.executors.base import Found, Limit
from tests.pool import builders
from tests.pool.executors.memory import MemorySystem
from tests.quotas import build

CARDS = tuple(
    {"uuid": f"THERE-a100-{n}", "index": n, "name": "A100", "memory_mib": 40960, "mig": {}} for n in range(2)
)


@pytest.mark.parametrize("lang", ["en", "zh-hans"])
@pytest.mark.parametrize(
    ("executor", "resource"), [("slurm", "gres/gpu"), ("kubernetes", "requests.nvidia.com/gpu")]
)
def test_quotas_are_seen_beside_the_limits_there_before_anything_is_pushed(
    visit: Callable[..., Page],
    axe: Callable[[Page], None],
    shot: Callable[[Page, str], None],
    lang: str,
    executor: str,
    resource: str,
) -> None:
    system = MemorySystem()
    system.nodes = [Found("hpc7", gpus=CARDS, cpu_milli=32000, memory_mib=65536)]
    system.there = [Limit("ml", resource, None, 6), Limit("cv", resource, 8, 4), Limit("nlp", resource, 2, 2)]
    admin = build.user("zhao")
    build.role(admin, "pool_admin")
    cluster = builders.cluster("hpc", executor=executor, name="HPC")
    with patch.dict(base._made, {executor: system}):
        page = visit(reverse("pool:cluster", args=[cluster.uid]), user=admin, lang=lang)
        axe(page)
        page.locator("form[action$='/do/limits/'] button").click()
        table = page.locator("table", has_text=resource)
        expect(table).to_contain_text("ml")
        expect(table).to_contain_text("cv")
        expect(table).not_to_contain_text("nlp")
        axe(page)
        shot(page, f"cluster-limits-{executor}-{lang}")
        assert "limits_set" not in system.calls
        page.locator("form[action$='/do/push/'] button[type=submit]").last.click()
        page.wait_for_load_state("load")
        assert {(one.scope, one.there) for one in system.there} == {("ml", 6), ("cv", 4), ("nlp", 2)}
