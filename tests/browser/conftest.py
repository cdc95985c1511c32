"""Chromium against the real ASGI application (pages and sockets) over the test database.

`server` runs uvicorn in a thread; `visit(path, user=…, lang=…, theme=…, width=…)` opens a page in a fresh browser
context, signed in without the form; `axe(page)` fails on accessibility violations; `shot(page, name)` keeps a picture
in $GPUPOOL_SHOTS where that names a folder. A page with console errors or failed loads fails its test.
"""

from __future__ import annotations

import os

os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"  # playwright's loop runs in the thread that uses the ORM

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from django.conf import settings
from django.db import connection
from django.test import Client
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request

from tests.chromium import PATIENCE_MS, browsing

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are marked `browser`."""
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.path).parents:
            item.add_marker(pytest.mark.browser)


@dataclass
class Server:
    """The running application. `url` has no slash at its end."""

    url: str

    def path(self, path: str) -> str:
        """The full address of a path."""
        return f"{self.url}{path}"


@pytest.fixture(scope="session")
def _running(django_db_setup: None, django_db_blocker: Any) -> Iterator[Server]:
    """uvicorn in a thread on a free port; its requests use the test database that is set up now."""
    from portal.asgi import application

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    settings.CSRF_TRUSTED_ORIGINS = [*settings.CSRF_TRUSTED_ORIGINS, f"http://127.0.0.1:{port}"]
    config = uvicorn.Config(application, log_level="warning", lifespan="off", ws="websockets-sansio")
    uvicorn_server = uvicorn.Server(config)
    thread = threading.Thread(target=uvicorn_server.run, args=[[listening]], name="uvicorn", daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not uvicorn_server.started:
        if time.monotonic() > deadline or not thread.is_alive():
            raise RuntimeError("the application did not start")
        time.sleep(0.02)
    yield Server(f"http://127.0.0.1:{port}")
    uvicorn_server.should_exit = True
    thread.join(10)
    # Threads of the application may still hold a connection, which would keep the test database from being dropped
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


@pytest.fixture
def server(_running: Server, transactional_db: None) -> Server:
    """The application; what the test writes is committed, and flushed afterwards."""
    return _running


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One browser for all tests."""
    with browsing() as browser:
        yield browser


@dataclass
class Complaints:
    """What the browser had to say against a page; `allow` holds parts of lines that are expected."""

    lines: list[str] = field(default_factory=list)
    allow: list[str] = field(default_factory=list)

    def found(self) -> list[str]:
        """Lines that nobody expected."""
        return [line for line in self.lines if not any(part in line for part in self.allow)]

    def watch(self, page: Page) -> None:
        """Collect console errors, uncaught errors, and requests that failed."""

        def console(message: ConsoleMessage) -> None:
            if message.type == "error":
                self.lines.append(f"console: {message.text} ({message.location.get('url', '')})")

        def failed(request: Request) -> None:
            if "ERR_ABORTED" not in (request.failure or ""):
                self.lines.append(f"failed: {request.url} {request.failure}")

        page.on("console", console)
        page.on("pageerror", lambda error: self.lines.append(f"error: {error}"))
        page.on("requestfailed", failed)


@pytest.fixture
def complaints() -> Iterator[Complaints]:
    """The collector of this test; anything unexpected at its end fails it."""
    collector = Complaints()
    yield collector
    assert not collector.found(), "\n".join(collector.found())


@pytest.fixture
def context(
    chromium: Browser, server: Server, complaints: Complaints
) -> Iterator[Callable[..., BrowserContext]]:
    """`context(user=None, lang="en", theme="light", width=1440, height=900)` → a fresh browser context."""
    made: list[BrowserContext] = []

    def make(
        user: Any = None, lang: str = "en", theme: str = "light", width: int = 1440, height: int = 900
    ) -> BrowserContext:
        new = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if theme == "dark" else "light",
            reduced_motion="reduce",
            has_touch=width < 600,
            base_url=server.url,
        )
        new.set_default_timeout(PATIENCE_MS)
        new.add_cookies([{"name": settings.LANGUAGE_COOKIE_NAME, "value": lang, "url": server.url}])
        if user is not None:
            sign_in(new, server, user)
        new.on("page", complaints.watch)
        made.append(new)
        return new

    yield make
    for each in made:
        each.close()


def sign_in(context: BrowserContext, server: Server, user: Any) -> None:
    """Give a browser context the session of `user` without going through the form."""
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    value = client.cookies[settings.SESSION_COOKIE_NAME].value
    context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": value, "url": server.url}])


def sign_in_by_form(page: Page, username: str, password: str) -> None:
    """As a person does it; ends on the page that follows."""
    page.goto("/accounts/login/")
    page.fill("#id_username", username)
    page.fill("#id_password", password)
    page.locator("#id_password").press("Enter")
    page.wait_for_url(lambda url: "/accounts/login/" not in url)


@pytest.fixture
def visit(context: Callable[..., BrowserContext]) -> Callable[..., Page]:
    """`visit("/design/", user=…, lang="zh-hans", theme="dark", width=390)` → the loaded page."""

    def go(path: str, **options: Any) -> Page:
        page = context(**options).new_page()
        page.goto(path, wait_until="load")
        return page

    return go


SETTLED = """async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  await document.fonts.ready;
  do { await frame(); await frame(); } while (document.querySelector('.htmx-request'));
}"""


def settled(page: Page) -> None:
    """Until the page has its fonts, has drawn, and no part of it is being fetched."""
    page.evaluate(SETTLED)


@pytest.fixture
def axe() -> Callable[..., None]:
    """`axe(page, ignore=[…])` fails on any WCAG 2.2 AA or best-practice violation."""

    def check(page: Page, ignore: tuple[str, ...] = ()) -> None:
        settled(page)
        # evaluate() runs outside the page's content security policy
        if not page.evaluate("'axe' in window"):
            page.evaluate(AXE)
        tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
        result = page.evaluate(
            "(tags) => axe.run(document, {runOnly: tags, resultTypes: ['violations']})", tags
        )
        bad = [v for v in result["violations"] if v["id"] not in ignore]
        lines = [f"{v['id']}: {v['help']}: {[n['html'][:160] for n in v['nodes'][:3]]}" for v in bad]
        assert not lines, f"{page.url}\n" + "\n".join(lines)

    return check


@pytest.fixture
def shot() -> Callable[..., None]:
    """`shot(page, "wall-zh-dark")` keeps a picture of the whole page where $GPUPOOL_SHOTS names a folder."""

    def take(page: Page, name: str, full: bool = True) -> None:
        if not (folder := os.environ.get("GPUPOOL_SHOTS")):
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=full)

    return take


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the window once it stands; 0 on a page that fits."""
    settled(page)
    return int(page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@pytest.fixture
def person(server: Server) -> Callable[..., Any]:
    """`person("lead", department=d, name="Chen Hao")` → a user with that role (none for None)."""
    from portal.accounts.models import RoleBinding, User

    numbers = iter(range(1, 1000))

    def make(role: str | None = "researcher", department: Any = None, name: str = "", **more: Any) -> Any:
        n = next(numbers)
        user = User(
            username=f"person{n}", display_name=name or f"Person {n}", email=f"p{n}@example.org", **more
        )
        user.language = more.get("language", "en")
        user.home_department = department
        user.set_password("correct horse battery")
        user.save()
        if role is not None:
            RoleBinding.objects.create(user=user, role=role, department=department)
        return user

    return make
