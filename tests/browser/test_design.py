"""The design system as a person meets it: each look, both languages, keyboard, phone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.conftest import Complaints, overflow

LOOKS = [
    (lang, theme, width) for lang in ("en", "zh-hans") for theme in ("light", "dark") for width in (1440, 390)
]


@pytest.mark.parametrize(("lang", "theme", "width"), LOOKS)
def test_design_page_is_accessible_in_every_look(
    visit: Callable[..., Page],
    axe: Callable[..., None],
    shot: Callable[..., None],
    lang: str,
    theme: str,
    width: int,
) -> None:
    page = visit("/design/", lang=lang, theme=theme, width=width)
    page.locator(".plot__canvas .main-svg").first.wait_for()
    assert overflow(page) <= 0
    axe(page)
    shot(page, f"design-{lang}-{theme}-{width}")


@pytest.mark.parametrize("path", ["/help/", "/accounts/login/"])
@pytest.mark.parametrize(("lang", "theme", "width"), [("en", "light", 1440), ("zh-hans", "dark", 390)])
def test_signed_out_pages(
    visit: Callable[..., Page],
    axe: Callable[..., None],
    shot: Callable[..., None],
    path: str,
    lang: str,
    theme: str,
    width: int,
) -> None:
    page = visit(path, lang=lang, theme=theme, width=width)
    assert overflow(page) <= 0
    axe(page)
    shot(page, f"{path.strip('/').replace('/', '-')}-{lang}-{theme}-{width}")


@pytest.mark.parametrize(("lang", "theme", "width"), [("en", "light", 1440), ("zh-hans", "dark", 390)])
def test_not_found_page_names_the_request(
    visit: Callable[..., Page],
    axe: Callable[..., None],
    person: Callable[..., Any],
    complaints: Complaints,
    lang: str,
    theme: str,
    width: int,
) -> None:
    complaints.allow.append("404 (Not Found)")
    page = visit("/no/such/page/", user=person(), lang=lang, theme=theme, width=width)
    assert len(page.locator(".stop .mono").inner_text()) >= 8
    assert overflow(page) <= 0
    axe(page)


def test_theme_is_kept_by_the_browser(visit: Callable[..., Page]) -> None:
    page = visit("/help/")
    page.get_by_role("button", name="Switch light or dark").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_language_switch_stays_on_the_page(visit: Callable[..., Page]) -> None:
    page = visit("/help/?from=x")
    page.get_by_role("button", name="切换到中文").click()
    expect(page.locator("html")).to_have_attribute("lang", "zh-Hans")
    assert page.url.endswith("/help/?from=x")
    page.get_by_role("button", name="Switch to English").click()
    expect(page.locator("html")).to_have_attribute("lang", "en")


def test_skip_link_is_the_first_stop_of_the_keyboard(visit: Callable[..., Page]) -> None:
    page = visit("/design/")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"


def test_dialog_opens_by_keyboard_and_gives_focus_back(visit: Callable[..., Page]) -> None:
    page = visit("/design/")
    opener = page.locator("[data-act=dialog]").first
    opener.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("#dlg-sample")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(opener).to_be_focused()


def test_chart_has_a_table_of_the_same_figures(visit: Callable[..., Page]) -> None:
    page = visit("/design/")
    plot = page.locator("#sample-chart")
    plot.locator(".main-svg").first.wait_for()
    plot.get_by_role("button", name="Show as table").click()
    rows = plot.locator(".plot__twin tbody tr")
    expect(rows).to_have_count(72)
    expect(plot.locator(".plot__twin td", has_text="N/A").first).to_be_visible()
    plot.get_by_role("button", name="Show as chart").click()
    expect(plot.locator(".main-svg").first).to_be_visible()


def test_reason_of_a_missing_value_shows_on_focus(visit: Callable[..., Page]) -> None:
    page = visit("/design/")
    tip = page.locator(".tip").first
    tip.focus()
    content = tip.evaluate("el => getComputedStyle(el, '::after').content")
    assert "not supported" in content


def test_phone_drawer_opens_and_closes(visit: Callable[..., Page], person: Callable[..., Any]) -> None:
    page = visit("/help/", user=person("pool_admin"), width=390)
    nav = page.locator("#nav")
    expect(nav).to_be_hidden()
    page.get_by_role("button", name="Menu").click()
    expect(nav).to_be_visible()
    page.keyboard.press("Escape")
    expect(nav).to_be_hidden()


def test_copy_button_copies(context: Callable[..., BrowserContext], server: Any) -> None:
    browser_context = context()
    browser_context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    page = browser_context.new_page()
    page.goto("/design/")
    page.locator("[data-act=copy]").first.click()
    assert page.evaluate("navigator.clipboard.readText()") == "GET /api/v1/requests/?state=queued"


def test_filters_go_into_the_address(visit: Callable[..., Page]) -> None:
    page = visit("/design/")
    page.fill("#fs", "lin yue")
    page.keyboard.press("Enter")
    page.wait_for_url("**/design/?q=lin+yue")
    page.go_back()
    page.wait_for_url("**/design/")


def test_content_security_policy_holds(visit: Callable[..., Page], complaints: Complaints) -> None:
    complaints.allow.append("Content Security Policy")
    page = visit("/design/")
    inject = """() => {
      const s = document.createElement('script');
      s.textContent = 'window.injected = 1';
      document.body.append(s);
      return window.injected ?? null;
    }"""
    assert page.evaluate(inject) is None


@pytest.mark.parametrize(
    ("role", "shown", "hidden"),
    [
        ("researcher", ["/leases/"], ["/operations/", "/prices/"]),
        ("lead", ["/leases/"], ["/operations/", "/finance/"]),
        ("pool_admin", ["/operations/", "/nodes/"], ["/finance/"]),
        ("finance", ["/finance/", "/months/", "/prices/", "/ledger/"], ["/operations/", "/nodes/"]),
        ("auditor", ["/nodes/", "/months/", "/ledger/"], ["/operations/", "/finance/"]),
    ],
)
def test_navigation_follows_the_role(
    visit: Callable[..., Page],
    person: Callable[..., Any],
    axe: Callable[..., None],
    shot: Callable[..., None],
    role: str,
    shown: list[str],
    hidden: list[str],
) -> None:
    page = visit("/help/", user=person(role, name="Lin Yue"))
    hrefs = [link.get_attribute("href") for link in page.locator("#nav a.nav__item").all()]
    assert not [path for path in shown if path not in hrefs]
    assert not [path for path in hidden if path in hrefs]
    axe(page)
    shot(page, f"nav-{role}", full=False)


def test_description_of_the_api_opens_under_the_policy(
    visit: Callable[..., Page], axe: Callable[..., None], person: Callable[..., Any]
) -> None:
    page = visit("/api/docs/", user=person("pool_admin"))
    expect(page.locator(".opblock-tag").first).to_be_visible()
    expect(page.get_by_role("main")).to_have_count(1)
    axe(page)


def test_chart_takes_the_colours_of_the_new_theme(visit: Callable[..., Page]) -> None:
    page = visit("/design/")
    axis = page.locator("#sample-chart .ytick text").first
    axis.wait_for()
    light = axis.evaluate("el => getComputedStyle(el).fill")
    page.get_by_role("button", name="Switch light or dark").click()
    page.wait_for_function(
        "before => getComputedStyle(document.querySelector('#sample-chart .ytick text')).fill !== before",
        arg=light,
    )


def test_reason_of_a_missing_value_fits_on_a_phone(
    visit: Callable[..., Page], shot: Callable[..., None]
) -> None:
    page = visit("/design/", width=390)
    page.locator(".tip").first.tap()
    box = page.locator(".tip").first.evaluate(
        "el => { const s = getComputedStyle(el, '::after'); return [parseFloat(s.left), parseFloat(s.width)]; }"
    )
    assert box[0] >= 0
    assert box[0] + box[1] <= 390
    shot(page, "tip-390", full=False)


def test_a_cold_page_is_light(visit: Callable[..., Page], person: Callable[..., Any]) -> None:
    page = visit("/help/", user=person("pool_admin"))
    sizes = page.evaluate(
        "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
        ".map(e => [e.name, e.transferSize, e.decodedBodySize])"
    )
    html = sizes[0][2]
    scripts = sum(sent for name, sent, _full in sizes if name.endswith(("js", "mjs")))
    assert html < 60_000
    assert scripts < 150_000
    assert sum(sent for _name, sent, _full in sizes) < 100_000, sizes
