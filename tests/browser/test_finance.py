"""Finance pages in Chromium: whole, accessible, and the walk from a month down to one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import expect

from monitoring.models import Scenario
from monitoring.services.what_if_sides import Answerer
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


def answered(user: Any) -> Scenario:
    """A what-if about a small recorded workload, with its answer."""
    jobs = ["job_id,submit_time,duration,gpu_num,vc"]
    jobs += [
        f"j{n},{600 * n},{7200 + 900 * (n % 5)},{1 + n % 3},{('视频生成', 'search')[n % 2]}"
        for n in range(40)
    ]
    params = {
        "source": "trace",
        "price": 16_000_000,
        "changes": {"switches": {"reclaim": False}, "nodes": {"gpu": 2}},
    }
    files = {"jobs": "\n".join(jobs).encode(), "quotas": "vc,nominal_gpus\n视频生成,6\nsearch,2\n".encode()}
    result = Answerer(params, **files, told=lambda _done, _all: True).answer()
    return Scenario.objects.create(
        name="What if owners took nothing back?", owner=user, params=params, state="ready", result=result,
        seconds=0.4, done=80, total=80,
    )  # fmt: skip


@pytest.mark.parametrize("look", LOOKS, ids=["en-light-wide", "zh-dark-phone"])
def test_every_finance_page_is_whole_and_accessible(
    lab: World,
    server: Server,
    context: Callable[..., Any],
    axe: Callable[..., None],
    complaints: Complaints,
    shot: Callable[..., Any],
    look: dict[str, Any],
) -> None:
    sun = person_of("sun", ("finance", None), name="孙梅")
    browser = context(**look)
    sign_in(browser, server, sun)
    page = browser.new_page()
    complaints.watch(page)
    line = LedgerEntry.objects.order_by("id").first()
    last = line.booked_month
    asked = answered(sun)
    for path in (
        "/finance/",
        "/months/",
        f"/months/?month={last:%Y-%m}&by=user",
        "/ledger/",
        f"/ledger/{line.uid}/",
        "/prices/",
        f"/months/close/?month={last:%Y-%m}",
        "/budgets/",
        "/reports/",
        "/reports/utilization/?period=last30&sort=-allocated",
        "/reports/chargeback/?period=last90",
        "/reports/files/",
        "/reports/what-if/",
        f"/reports/what-if/{asked.uid}/",
    ):
        page.goto(server.path(path))
        expect(page.locator("h1")).to_be_visible()
        shot(page, f"finance-{look['lang']}-{path.partition('?')[0].strip('/').replace('/', '-')[:24]}")
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


def test_a_table_is_walked_by_keys_and_copied_with_every_digit(
    lab: World, server: Server, context: Callable[..., Any], complaints: Complaints
) -> None:
    sun = person_of("sun", ("finance", None))
    browser = context(lang="en", theme="light", width=1440)
    browser.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    sign_in(browser, server, sun)
    page = browser.new_page()
    complaints.watch(page)
    page.goto(server.path("/reports/chargeback/?period=last90"))
    page.get_by_role("button", name="Copy table").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()").splitlines()
    heads, first = copied[0].split("\t"), copied[1].split("\t")
    charge = heads.index("To be charged CNY")
    whole = sum(line.amount_micro for line in LedgerEntry.objects.all())
    assert copied[-1].split("\t")[0] == "Total"
    assert round(float(copied[-1].split("\t")[charge]) * 1_000_000) == whole
    page.locator("#report-table tbody th").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.cellIndex") == 1
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.cellIndex") == len(heads) - 1
    page.keyboard.press("Home")
    page.keyboard.press("Control+c")
    assert page.evaluate("navigator.clipboard.readText()") == first[0]
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"department="))
    assert complaints.found() == []


def test_order_and_columns_are_chosen_on_the_page_and_come_back(
    lab: World, server: Server, context: Callable[..., Any], axe: Callable[..., None], complaints: Complaints
) -> None:
    sun = person_of("sun", ("finance", None))
    browser = context(lang="en", theme="light", width=1440)
    sign_in(browser, server, sun)
    page = browser.new_page()
    complaints.watch(page)
    page.goto(server.path("/ledger/"))
    heads = page.locator("#ledger-table thead th")
    expect(heads).to_have_count(9)
    heads.filter(has_text="GPU·h").get_by_role("link").click()
    expect(page).to_have_url(re.compile("sort=hours"))
    expect(heads.filter(has_text="GPU·h")).to_have_attribute("aria-sort", "ascending")
    page.locator("summary", has_text="Columns").click()
    axe(page)
    page.locator(".menu__list").get_by_role("link", name="Price").click()
    expect(heads).to_have_count(8)
    page.goto(server.path("/ledger/"))
    expect(page).to_have_url(re.compile("sort=hours&hide=price"))
    page.locator("summary", has_text="Export").click()
    page.get_by_text("Large files…").click()
    expect(page.locator("h1")).to_have_text("Large files")
    page.goto(server.path("/ledger/"))
    page.set_viewport_size({"width": 390, "height": 844})
    assert overflow(page) == 0
    page.locator("summary", has_text="Order").click()
    page.locator(".menu__list a[href*='sort=-hours']").click()
    expect(page).to_have_url(re.compile("sort=-hours"))
    row = page.locator("#ledger-table tbody tr:has(a)").last
    assert row.bounding_box()["height"] < 130, "a line is a few rows of text on a phone"
    page.locator("summary", has_text="Columns").click()
    page.get_by_role("link", name="Usual order and columns").click()
    page.goto(server.path("/ledger/"))
    expect(heads).to_have_count(9)
    assert complaints.found() == []
