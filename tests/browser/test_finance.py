"""Finance pages in Chromium: whole, accessible, and the walk from a month down to one line."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import expect

from quotas.models import LedgerEntry
from quotas.tasks_money import reconcile_books
from tests.browser.conftest import Complaints, Server, overflow, sign_in
from tests.quotas.money.build import World, world
from tests.quotas.money.build import person as person_of

LOOKS = [
    {"lang": "en", "theme": "light", "width": 1440},
    {"lang": "zh-hans", "theme": "dark", "width": 390},
]


@pytest.fixture
def lab(server: Server) -> World:
    """Some weeks of leases, one of them running."""
    w = world()
    now = datetime.now(UTC)
    w.price("16", now - timedelta(days=70))
    for n in range(14):
        start = now - timedelta(days=60 - 4 * n)
        w.lease(
            start,
            start + timedelta(hours=9 + n),
            charge=(1000, 500, 142)[n % 3],
            department=(w.vision, w.search)[n % 2],
        )
    w.lease(now - timedelta(hours=3))
    w.counter(w.vision, 1000)
    reconcile_books()
    return w


@pytest.mark.parametrize("look", LOOKS, ids=["en-light-wide", "zh-dark-phone"])
def test_every_finance_page_is_whole_and_accessible(
    lab: World,
    server: Server,
    context: Callable[..., Any],
    axe: Callable[..., None],
    complaints: Complaints,
    look: dict[str, Any],
) -> None:
    sun = person_of("sun", ("finance", None), name="孙梅")
    browser = context(**look)
    sign_in(browser, server, sun)
    page = browser.new_page()
    complaints.watch(page)
    line = LedgerEntry.objects.order_by("id").first()
    last = line.booked_month
    for path in (
        "/finance/",
        "/months/",
        f"/months/?month={last:%Y-%m}&by=user",
        "/ledger/",
        f"/ledger/{line.uid}/",
        "/prices/",
        f"/months/close/?month={last:%Y-%m}",
    ):
        page.goto(server.path(path))
        expect(page.locator("h1")).to_be_visible()
        assert overflow(page) == 0, path
        axe(page)
    assert complaints.found() == []


def test_from_the_month_down_to_a_line_and_back(
    lab: World, server: Server, context: Callable[..., Any], complaints: Complaints
) -> None:
    sun = person_of("sun", ("finance", None))
    browser = context(lang="en", theme="light", width=1440)
    sign_in(browser, server, sun)
    page = browser.new_page()
    complaints.watch(page)
    month = LedgerEntry.objects.order_by("id").first().booked_month
    page.goto(server.path(f"/months/?month={month:%Y-%m}"))
    page.get_by_role("link", name="Vision").first.click()
    page.get_by_role("link", name="Lin Yue").first.click()
    page.locator("tfoot a").click()
    expect(page.locator("h1")).to_have_text("Ledger")
    page.locator("tbody th a").first.click()
    expect(page.get_by_text("GPU-milliseconds")).to_be_visible()
    page.go_back()
    expect(page.locator("h1")).to_have_text("Ledger")
    assert complaints.found() == []
