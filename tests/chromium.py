"""Debian's Chromium under Playwright, for every test that looks at pages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, expect, sync_playwright

from tests.parts import missing

PATIENCE_MS = 60_000  # a machine may be slow; what comes at all comes long before
expect.set_options(timeout=PATIENCE_MS)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """A browser, closed after. Without Chromium the test is skipped; in CI a missing part is a failure."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        missing("chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()
