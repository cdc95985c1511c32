"""Signing in, people, notices, audit, incidents and the API page in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from portal.accounts.models import ApiToken, Department, User
from portal.accounts.services import password_reset, token_create
from portal.notify.services import notify
from portal.ops.models import Incident
from portal.ops.services import incident_open
from portal.ops.services.outbox import outbox_deliver
from tests.browser.conftest import Complaints, Server, sign_in_by_form
from tests.portal.builders import actor, admin, department, person

LOOKS = [
    {"lang": "en", "theme": "light", "width": 1440},
    {"lang": "zh-hans", "theme": "dark", "width": 390},
]


@pytest.fixture
def people(server: Server) -> User:
    """An administrator among some people, departments, tokens, notices and incidents."""
    boss = admin()
    top = department("qinghe", None, "清禾研究院")
    vision = department("vision", top, "Vision & Multimodal")
    for n in range(12):
        person(f"person{n}", ("researcher", vision), home_department=vision, email=f"p{n}@qinghe.lan")
    lin = person("lin.yue", ("researcher", vision), ("lead", top), home_department=vision)
    for who in (boss, lin):
        token_create(acting_user=actor(who), user=who, name="laptop", scopes=["read", "request"])
    incident_open(
        kind="node_lost", dedupe_key="n", severity="critical", subject=top, facts={"node": "sh-h800-05"}
    )
    outbox_deliver(limit=500)
    notify(
        user_ids=[boss.pk],
        kind="accounts.role_granted",
        params={"role": "lead", "where": "Vision", "by": "x"},
    )
    return boss


def _pages() -> list[str]:
    lin, vision, incident = (
        User.objects.get(username="lin.yue"),
        Department.objects.get(code="vision"),
        Incident.objects.get(),
    )
    return [
        "/people/",
        f"/people/{lin.uid}/",
        "/people/new/",
        "/people/import/people/",
        "/people/import/departments/",
        "/departments/",
        f"/departments/{vision.uid}/",
        "/departments/new/",
        "/roles/",
        "/tokens/",
        "/accounts/tokens/",
        "/accounts/profile/",
        "/accounts/password/",
        "/notices/",
        "/notices/preferences/",
        "/notices/webhooks/",
        "/audit/",
        "/incidents/",
        f"/incidents/{incident.uid}/",
    ]


@pytest.mark.parametrize("look", LOOKS, ids=["en-light-wide", "zh-dark-phone"])
def test_every_page_is_whole_and_accessible(
    people: User, context: Callable[..., Any], axe: Callable[..., None], look: dict[str, Any]
) -> None:
    page: Page = context(user=people, **look).new_page()
    for path in _pages():
        page.goto(path, wait_until="load")
        axe(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            f"{path} is wider than the window"
        )


def test_dialogs_open_and_are_accessible(
    people: User, visit: Callable[..., Page], axe: Callable[..., None]
) -> None:
    lin = User.objects.get(username="lin.yue")
    page = visit(f"/people/{lin.uid}/", user=people)
    for name in ("dlg-edit", "dlg-role", "dlg-suspend"):
        page.click(f"[data-target={name}]")
        expect(page.locator(f"#{name}")).to_be_visible()
        axe(page)
        page.keyboard.press("Escape")
    page.click("[data-target=dlg-suspend]")
    page.fill("#id_suspend-reason", "left the project")
    page.click("#dlg-suspend button[type=submit]")
    expect(page.locator(".page-head")).to_contain_text("Suspended")
    lin.refresh_from_db()
    assert not lin.is_active
    assert not ApiToken.objects.filter(user=lin, revoked_at=None).exists()


def test_a_first_password_is_changed_and_the_person_chooses_language_and_theme(
    people: User, context: Callable[..., Any], complaints: Complaints
) -> None:
    complaints.allow.append("400 (Bad Request)")
    lin = User.objects.get(username="lin.yue")
    _user, value = password_reset(acting_user=actor(people), user=lin)
    page: Page = context().new_page()
    sign_in_by_form(page, "lin.yue", value)
    page.wait_for_url("**/accounts/password/")
    page.fill("#id_old_password", value)
    page.fill("#id_password", "short")
    page.fill("#id_repeat", "short")
    page.click("main form.card button[type=submit]")
    expect(page.locator("[role=alert]")).to_be_visible()
    page.fill("#id_old_password", value)
    page.fill("#id_password", "一句足够长的话语 2026")
    page.fill("#id_repeat", "一句足够长的话语 2026")
    page.click("main form.card button[type=submit]")
    page.wait_for_url(lambda url: "/accounts/password/" not in url)
    page.goto("/accounts/profile/")
    page.get_by_role("button", name="切换到中文").click()
    expect(page.locator("html")).to_have_attribute("lang", "zh-Hans")
    with page.expect_response("**/accounts/theme/"):
        page.click("[data-act=theme]")
    lin.refresh_from_db()
    assert (lin.language, lin.theme, lin.must_change_password) == ("zh-hans", "dark", False)


def test_a_token_is_shown_once(people: User, visit: Callable[..., Page]) -> None:
    page = visit("/accounts/tokens/", user=people)
    page.fill("#id_name", "ci-eval")
    page.click("main form.card button[type=submit]")
    value = page.locator(".once code").inner_text()
    assert value.startswith("gpp_")
    page.goto("/accounts/tokens/")
    assert value not in page.content()


def test_the_api_page_breaks_no_policy(people: User, visit: Callable[..., Page]) -> None:
    page = visit("/api/docs/", user=people, theme="dark")
    expect(page.locator("#swagger-ui .info .title")).to_be_visible()
    page.locator("#operations-tag-users").click()
    page.locator(".opblock-summary").first.click()
    expect(page.locator(".opblock-body").first).to_be_visible()
    assert page.evaluate("document.documentElement.classList.contains('dark-mode')")
