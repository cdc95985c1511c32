"""The wall of 10,000 cards in Chromium: how soon it is there, what one update costs the browser, how much script it is.

An update is what the page does for one frame of the hub: taking it in, and drawing it at the next animation frame.
Both are timed inside the page (the callbacks themselves, without waiting for the screen); `_page_ms` tells the same
with the browser's own work of that frame on the page's thread: style, layout, paint. Chromium draws in software here.
Full: every card has another value. A tenth: every tenth card has.
"""

from __future__ import annotations

import gzip
import statistics
import time
from typing import Any

CARDS, UPDATES, TENTH = 10_000, 12, 10
WATCH = """
window.costs = []; window.pages = []; window.taken = 0;
const after = new MessageChannel(), begun = [];
after.port1.onmessage = () => window.pages.push(performance.now() - begun.shift());
const frame = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (call) => frame((t) => {
  const began = performance.now(); call(t);
  if (window.taken) {
    window.costs.push(window.taken + performance.now() - began);
    begun.push(began - window.taken); window.taken = 0;
    after.port2.postMessage(0);
  }
});
const own = Object.getOwnPropertyDescriptor(WebSocket.prototype, 'onmessage');
Object.defineProperty(WebSocket.prototype, 'onmessage', { ...own, set(call) {
  own.set.call(this, (event) => {
    const began = performance.now(); call(event);
    if (event.data.byteLength > 1000) window.taken += performance.now() - began;
  });
} });
"""
THERE = "() => [...document.querySelectorAll('#wall-key [data-state] b')].some((b) => b.textContent.includes(','))"


def _updates(page: Any, ids: list[int], parts: int) -> tuple[list[float], list[float]]:
    """Milliseconds that each update took the page's script, and the page with its frame."""
    import numpy as np

    from monitoring.services.bus import publish
    from tests.perf._wall_scale import records

    rng = np.random.default_rng(parts)
    page.evaluate("window.costs = []; window.pages = []; window.taken = 0")
    for number in range(UPDATES):
        publish(records(ids, number % parts, parts, rng))
        deadline = time.monotonic() + 10
        while page.evaluate("window.pages.length") <= number:
            if time.monotonic() > deadline:
                raise RuntimeError("an update did not reach the page")
            page.wait_for_timeout(50)
    costs, pages = page.evaluate("[window.costs, window.pages]")
    return costs[:UPDATES], pages[:UPDATES]


def _measure(page: Any, port: int, ids: list[int]) -> dict[str, float]:
    asked: set[str] = set()
    page.on("request", lambda one: asked.add(one.url) if one.resource_type == "script" else None)
    address = f"http://127.0.0.1:{port}/wall/"
    page.goto(address)
    page.wait_for_function(THERE, timeout=60_000)  # the server has read its fleet, the browser its files
    page.goto(address, wait_until="commit")
    page.wait_for_function(THERE, timeout=60_000)
    first = float(page.evaluate("performance.now()"))
    full, full_page = _updates(page, ids, 1)
    tenth, tenth_page = _updates(page, ids, TENTH)
    scripts = {url: page.request.get(url).body() for url in asked}
    tiles = page.evaluate("[...document.querySelectorAll('#wall canvas')].filter((c) => c.width).length")
    return {
        "first_view_ms": round(first),
        "full_ms": round(statistics.median(full), 2),
        "full_worst_ms": round(max(full), 2),
        "full_page_ms": round(statistics.median(full_page), 2),
        "tenth_ms": round(statistics.median(tenth), 2),
        "tenth_worst_ms": round(max(tenth), 2),
        "tenth_page_ms": round(statistics.median(tenth_page), 2),
        "nodes_drawn": tiles,
        "script_gzip_kb": round(sum(len(gzip.compress(body, 6)) for body in scripts.values()) / 1000, 1),
    }


def run() -> dict[str, Any]:
    """Times in the browser, and the weight of the page's scripts."""
    from tests.perf._database import fresh_database

    with fresh_database():
        from tests.chromium import browsing
        from tests.perf._wall_scale import cookie_of, fleet, web_process

        ids = fleet(CARDS)
        with web_process(cookie_of()) as web, browsing() as browser:
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            name, _, value = web.cookie.partition("=")
            context.add_cookies([{"name": name, "value": value, "url": f"http://127.0.0.1:{web.port}"}])
            page = context.new_page()
            page.add_init_script(WATCH)
            figures = _measure(page, web.port, ids)
            context.close()
    return {
        "sizes": {"gpus": CARDS, "updates": UPDATES, "changed": CARDS // TENTH},
        "figures": figures,
        "aims": {
            "first_view_ms": ["<", 2000],
            "full_ms": ["<", 16],
            "tenth_ms": ["<", 4],
            "script_gzip_kb": ["<", 150],
        },
    }
