"""Pages of waste, alerts and comparison in Chromium: both languages, both themes, phone, accessibility, table twins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from playwright.sync_api import Page, expect

from monitoring.models import AlertRule, Finding, GpuRollup
from monitoring.selectors.board import board_forget
from monitoring.services.findings import findings_sweep
from pool.models import IdleWatch
from portal.accounts.models import Role
from portal.kernel.clock import now
from tests.browser.conftest import Server, overflow
from tests.monitoring import builders as b


@pytest.fixture
def found(server: Server) -> Iterator[dict[str, Any]]:
    vision = b.department("vision")
    node = b.node("sh-h800-01", 2)
    first, second = node.gpus.order_by("index")
    holder, admin = b.person("wu.tao", where=vision), b.person("zhao.rui", Role.POOL_ADMIN)
    lease = b.held(first, holder, vision, since=now() - timedelta(hours=9))
    IdleWatch.objects.create(
        allocation=lease.allocation, state="idle", idle_since=now() - timedelta(hours=7, minutes=20),
        evidence={"cards": 1, "activity_pm": 4, "processes": 1},
    )  # fmt: skip
    process = {"pid": 20418, "name": "jupyter-lab", "user": "tan", "mem_mib": 9216}
    second.foreign_use = [{**process, "since": (now() - timedelta(hours=4)).isoformat()}]
    second.save()
    hour = now().replace(minute=0, second=0, microsecond=0)
    GpuRollup.objects.bulk_create(
        GpuRollup(
            gpu_id=card.pk, step=60, bucket=hour - timedelta(minutes=k), samples=6, covered_s=60, util_n=6,
            util_sum=6 * (600 + 100 * card.index), util_max=900,
        )
        for card in (first, second)
        for k in range(90)
    )  # fmt: skip
    AlertRule.objects.create(name="Hot cards", metric="gpu_temp_c", threshold=84)
    board_forget()
    assert findings_sweep()["opened"] == 2
    yield {
        "admin": admin,
        "node": node,
        "cards": [first, second],
        "finding": Finding.objects.get(kind="idle"),
    }
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE monitoring_gpusample")


@pytest.mark.parametrize(("lang", "theme", "width"), [("en", "light", 1440), ("zh-hans", "dark", 390)])
def test_pages_read_well(
    found: dict[str, Any], visit: Callable[..., Page], axe: Callable[..., None], shot: Callable[..., Any],
    lang: str, theme: str, width: int,
) -> None:  # fmt: skip
    node, rule = found["node"], AlertRule.objects.get()
    pages = {
        "waste": ("/waste/", "7.3"),
        "finding": (f"/waste/{found['finding'].uid}/", "7.3"),
        "alerts": ("/alerts/", "Hot cards"),
        "alert": (f"/alerts/{rule.uid}/", "Hot cards"),
        "compare": (f"/gpus/compare/?node={node.uid}&span=1h", "sh-h800-01/1"),
    }
    for name, (path, text) in pages.items():
        page = visit(path, user=found["admin"], lang=lang, theme=theme, width=width)
        expect(page.locator("#content")).to_contain_text(text)
        if name == "compare":
            expect(page.locator(".js-plotly-plot")).to_have_count(1)
        assert overflow(page) <= 0
        axe(page)
        shot(page, f"{name}-{lang}-{theme}-{width}")


def test_one_button_helps_and_the_comparison_has_its_table(
    found: dict[str, Any], visit: Callable[..., Page]
) -> None:
    page = visit("/waste/?kind=idle", user=found["admin"])
    page.get_by_role("button", name="Ask holder").click()
    expect(page.locator("#content")).to_contain_text("1 finding")
    assert Finding.objects.get(kind="idle").told_at is not None
    page = visit(f"/gpus/compare/?node={found['node'].uid}&span=1h", user=found["admin"])
    page.get_by_role("button", name="Show as table").click()
    expect(page.locator(".plot__twin thead")).to_contain_text("sh-h800-01/0, %")
    expect(page.locator(".plot__twin tbody tr").first).to_contain_text("70")
