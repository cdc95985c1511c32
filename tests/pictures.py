"""The pictures of README's tour, made anew: `python -m tests.pictures http://127.0.0.1:8000 PASSWORD [NAME …]`.

It signs in to a running demo (`manage.py up --demo`, once its history is filled in) with the password that it printed
and writes `docs/pictures/*.png`: 1200 pixels wide, 128 colours, some 60 kB each.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page

from tests.chromium import browsing

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH, COLOURS = 1200, 128
SETTLED_MS = 15_000
"""Live lines and charts have drawn some seconds by then."""


class Demo:
    """A browser signed in to the demo, one page for each person."""

    def __init__(self, browser: Browser, base: str, password: str) -> None:
        self.browser, self.base, self.password = browser, base.rstrip("/"), password
        self._pages: dict[str, Page] = {}

    def page(self, person: str) -> Page:
        """The person's page, English and light."""
        if person not in self._pages:
            context = self.browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
            context.add_cookies([{"name": "django_language", "value": "en", "url": self.base}])
            page = context.new_page()
            page.set_default_timeout(120_000)
            page.goto(f"{self.base}/accounts/login/")
            page.fill("input[name=username]", person)
            page.fill("input[type=password]", self.password)
            page.press("input[type=password]", "Enter")
            page.wait_for_selector(".nav__who")
            self._pages[person] = page
        return self._pages[person]

    def first(self, person: str, listing: str, pattern: str, row: str = "") -> str:
        """The first link of a list (of its rows with some words) that looks like the pattern."""
        page = self.page(person)
        page.goto(self.base + listing)
        rows = page.locator("main tr", has_text=row) if row else page.locator("main")
        links = rows.locator("a[href]").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        found = next((str(link) for link in links if re.search(pattern, link)), None)
        if found is None:
            raise SystemExit(
                f"{listing} has no such row now ({row or pattern}): let the demo run some minutes."
            )
        return found

    def picture(
        self, name: str, person: str, address: str, height: int, act: Callable[[Page], None] | None = None
    ) -> None:
        """Write one."""
        page = self.page(person)
        page.set_viewport_size({"width": WIDTH, "height": height})
        page.goto(self.base + address)
        if act is not None:
            act(page)
        page.wait_for_timeout(SETTLED_MS)
        seen = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        seen.quantize(COLOURS, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)


def request(demo: Demo) -> None:
    """The form with something in it."""
    words = "Text-to-video, 720p stage: fine-tuning on the June set"
    demo.picture(
        "request", "lin.yue", "/requests/new/", 1290, lambda page: page.fill("[name=purpose]", words)
    )


def why(demo: Demo) -> None:
    """A request that waits: more H800 than are free, asked as lin.yue and approved as chen.hao before."""
    address = demo.first("lin.yue", "/requests/", r"/requests/[0-9a-f-]{36}/$", row="Queued")
    demo.picture("why", "lin.yue", address, 980)


def approvals(demo: Demo) -> None:
    """A step opened beside the queue."""
    address = demo.first("chen.hao", "/approvals/", r"/approvals/[0-9a-f-]{36}/")
    demo.picture("approvals", "chen.hao", address, 1130)


def wall(demo: Demo) -> None:
    """All cards."""
    demo.picture("wall", "zhao.rui", "/wall/", 1180)


def lease(demo: Demo) -> None:
    """A job that runs."""
    address = demo.first("lin.yue", "/leases/", r"/leases/[0-9a-f-]{36}/$", row="Running")
    demo.picture("lease", "lin.yue", address, 1000)


def month(demo: Demo) -> None:
    """The last whole month for finance."""
    last = date.today().replace(day=1) - timedelta(days=1)
    demo.picture("month", "sun.mei", f"/months/?month={last:%Y-%m}", 1020)


PICTURES = {made.__name__: made for made in (request, why, approvals, wall, lease, month)}


def main(base: str, password: str, *names: str) -> None:
    """Make those named, or all."""
    with browsing() as browser:
        demo = Demo(browser, base, password)
        for name in names or PICTURES:
            PICTURES[name](demo)


if __name__ == "__main__":
    main(*sys.argv[1:])
