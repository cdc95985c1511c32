"""The wall and a card's page in Chromium: live figures, keyboard, pop card, both languages, phone, accessibility."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from playwright.sync_api import Page, expect

from monitoring.selectors.board import board_forget
from monitoring.selectors.identity import identity_forget
from monitoring.services import ingest, intake
from monitoring.services.bus import facts_changed
from portal.accounts.models import Role
from portal.kernel.clock import now
from tests.browser.conftest import Server, overflow
from tests.monitoring import builders as b


@pytest.fixture
def fleet(server: Server) -> Iterator[dict[str, Any]]:
    vision = b.department("vision")
    one, two = (
        b.node("sh-h800-01", 8),
        b.node("bj-l40s-01", 4, site="beijing", model="NVIDIA L40S", schedulable="cordoned"),
    )
    cards = list(one.gpus.all())
    holder, admin = b.person("wu.tao", where=vision), b.person("zhao.rui", Role.POOL_ADMIN)
    lease = b.held(cards[1], holder, vision)
    cards[7].condition = "fault"
    cards[7].save()
    identity_forget()
    board_forget()
    facts_changed(inventory=True)
    scene = {"node": one, "cards": cards, "holder": holder, "admin": admin, "lease": lease, "other": two}
    feed(scene, util=93)
    yield scene
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE monitoring_gpusample")


def feed(scene: dict[str, Any], *, util: int, seconds_ago: int = 0) -> None:
    """One sample of each card but the broken one; the second has no power figure."""
    at = now() - timedelta(seconds=seconds_ago)
    rows = [b.row(card, at, util=util) for card in scene["cards"][:7] if card.index != 2]
    rows.append(
        b.row(scene["cards"][2], at, util=0, power_mw=None, missing={"power_mw": "not_supported"}, procs=[])
    )
    batch, refused = intake.batch_of(node_id=scene["node"].pk, message=b.message(*rows))
    assert not refused
    ingest.samples_write(batches=[batch])


def drawn(page: Page) -> None:
    """The wall has its cells and live figures."""
    expect(page.locator("#wall .node")).to_have_count(2)
    expect(page.locator("#wall-key [data-state=in_use] b")).to_have_text("1")


@pytest.mark.parametrize(("lang", "theme", "width"), [("en", "light", 1440), ("zh-hans", "dark", 390)])
def test_wall_is_live_readable_and_fits(
    fleet: dict[str, Any], visit: Callable[..., Page], axe: Callable[..., None], shot: Callable[..., Any],
    lang: str, theme: str, width: int,
) -> None:  # fmt: skip
    page = visit("/wall/", user=fleet["admin"], lang=lang, theme=theme, width=width)
    drawn(page)
    expect(page.locator("#wall-key [data-state=fault] b")).to_have_text("1")
    expect(page.locator("[data-live-state]")).to_contain_text("Live ·" if lang == "en" else "实时 ·")
    node = page.locator("#wall .node", has_text="sh-h800-01")
    expect(node).to_contain_text("93 %")
    feed(fleet, util=41)
    expect(node).to_contain_text("41 %")
    assert overflow(page) <= 0
    axe(page)
    shot(page, f"wall-{lang}-{theme}-{width}")


def test_keyboard_moves_opens_the_card_and_the_gpu(
    fleet: dict[str, Any], visit: Callable[..., Page], axe: Callable[..., None]
) -> None:
    page = visit("/wall/?site=shanghai", user=fleet["holder"])
    expect(page.locator("#wall .node")).to_have_count(1)
    expect(page.locator("#wall .node")).to_contain_text("93 %")
    page.locator("#wall").focus()
    page.keyboard.press("Home")
    card = page.locator("#wall-card")
    expect(card).to_contain_text("sh-h800-01 · GPU 0")
    page.keyboard.press("ArrowRight")
    expect(card).to_contain_text("sh-h800-01 · GPU 1")
    expect(card).to_contain_text("Wu.Tao")
    expect(card).to_contain_text("72.0 of 79.6")
    page.keyboard.press("ArrowRight")
    expect(card).to_contain_text("GPU 2")
    expect(card.locator(".na").first).to_contain_text("does not report it")
    axe(page)
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    page.keyboard.press("Enter")
    page.wait_for_url("**/gpus/*/")
    expect(page.locator("h1")).to_contain_text("sh-h800-01 · GPU 2")


def test_measure_and_filters_live_in_the_url(fleet: dict[str, Any], visit: Callable[..., Page]) -> None:
    page = visit("/wall/", user=fleet["admin"])
    drawn(page)
    page.locator("[data-measure=temp]").first.click()
    page.wait_for_url("**measure=temp**")
    page.reload()
    expect(page.locator("#wall-measures [aria-current=true]")).to_have_text("Temperature")
    page.locator("#wall-key [data-state=fault]").click()
    page.wait_for_url("**state=fault**")
    assert "measure=temp" in page.url
    page.goto("/wall/?view=table&state=fault")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text("GPU 7")


@pytest.mark.parametrize(("lang", "theme", "width"), [("zh-hans", "light", 1440), ("en", "dark", 390)])
def test_card_page_streams_its_four_measures(
    fleet: dict[str, Any], visit: Callable[..., Page], axe: Callable[..., None], shot: Callable[..., Any],
    lang: str, theme: str, width: int,
) -> None:  # fmt: skip
    for k in range(30):
        feed(fleet, util=60 + k, seconds_ago=300 - 10 * k)
    page = visit(f"/gpus/{fleet['cards'][1].uid}/", user=fleet["holder"], lang=lang, theme=theme, width=width)
    value = page.locator("[data-line=busy] [data-value]")
    expect(value).to_have_text("93\u00a0%")
    expect(page.locator("[data-line=power] [data-value]")).to_have_text("621\u00a0W")
    expect(page.locator("[data-line=mem] canvas").first).to_be_visible()
    feed(fleet, util=12)
    expect(value).to_have_text("12\u00a0%")
    assert overflow(page) <= 0
    axe(page)
    shot(page, f"gpu-{lang}-{theme}-{width}")


def test_a_card_without_power_says_n_a(fleet: dict[str, Any], visit: Callable[..., Page]) -> None:
    page = visit(f"/gpus/{fleet['cards'][2].uid}/", user=fleet["holder"])
    expect(page.locator("[data-line=power] [data-value]")).to_have_text("N/A")
    expect(page.locator("[data-line=busy] [data-value]")).to_have_text("0\u00a0%")
