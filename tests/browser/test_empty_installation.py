"""Every page of an installation that has nothing yet: it opens for its role, fits, and is accessible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import BrowserContext

from tests.browser.conftest import overflow

PAGES = [
    ("pool_admin", "/operations/"),
    ("pool_admin", "/nodes/"),
    ("pool_admin", "/nodes/import/"),
    ("pool_admin", "/nodes/enrol/"),
    ("pool_admin", "/wall/"),
    ("pool_admin", "/sources/"),
    ("pool_admin", "/sources/new/"),
    ("pool_admin", "/people/"),
    ("pool_admin", "/people/new/"),
    ("pool_admin", "/roles/"),
    ("pool_admin", "/tokens/"),
    ("pool_admin", "/departments/"),
    ("pool_admin", "/departments/new/"),
    ("pool_admin", "/audit/"),
    ("pool_admin", "/incidents/"),
    ("finance", "/finance/"),
    ("finance", "/months/"),
    ("finance", "/ledger/"),
    ("finance", "/prices/"),
    ("researcher", "/leases/"),
    ("researcher", "/wall/"),
    ("researcher", "/accounts/profile/"),
    ("researcher", "/accounts/password/"),
    ("researcher", "/accounts/tokens/"),
    ("researcher", "/home/"),
    ("researcher", "/requests/"),
    ("researcher", "/requests/new/"),
    ("researcher", "/quotas/"),
    ("researcher", "/notices/"),
    ("lead", "/leases/"),
    ("lead", "/approvals/"),
    ("lead", "/approvals/delegations/"),
    ("lead", "/quotas/"),
    ("lead", "/quotas/changes/"),
    ("lead", "/quotas/changes/new/"),
    ("pool_admin", "/quotas/import/"),
    ("pool_admin", "/policy/"),
    ("finance", "/months/close/"),
    ("auditor", "/audit/"),
]
LOOKS = [("en", "light", 1440), ("zh-hans", "dark", 390)]


@pytest.mark.parametrize(("lang", "theme", "width"), LOOKS)
@pytest.mark.parametrize("role", list(dict.fromkeys(role for role, _path in PAGES)))
def test_pages_of_an_empty_installation(
    context: Callable[..., BrowserContext],
    person: Callable[..., Any],
    axe: Callable[..., None],
    shot: Callable[..., None],
    role: str,
    lang: str,
    theme: str,
    width: int,
) -> None:
    page = context(user=person(role, name="Lin Yue"), lang=lang, theme=theme, width=width).new_page()
    wrong = []
    for path in (path for of, path in PAGES if of == role):
        page.goto(path, wait_until="load")
        try:
            assert overflow(page) <= 0
            assert page.locator("main h1").count() == 1
            shot(page, f"empty-{role}-{path.strip('/').replace('/', '-')}-{lang}-{theme}-{width}")
            axe(page)
        except AssertionError as error:
            wrong.append(f"{path}: {error}")
    assert not wrong, "\n".join(wrong)
