"""The live feed of pages: snapshot and numbered deltas, gaps, silence, reconnecting, pausing, other people's doors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, WebSocketRoute, expect

START = """async (path) => {
  const { connect } = await import(document.querySelector('script[type=module]').src.replace('app.mjs', 'live.mjs'));
  window.seen = [];
  window.states = [];
  window.feed = connect(path, {
    indicator: document.querySelector('[data-live-state]'),
    onSnapshot: (m) => window.seen.push(['snapshot', m.n]),
    onDelta: (m) => window.seen.push(['delta', m.n]),
    onState: (s) => window.states.push(s),
  });
}"""
NOW = "2026-06-16T06:03:12Z"


class Peer:
    """The other end of the socket, under the test's control. `routes` holds a route per connection made."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.routes: list[WebSocketRoute] = []
        self.heard: list[dict[str, Any]] = []
        page.route_web_socket("**/ws/sample/", self._accept)

    def _accept(self, route: WebSocketRoute) -> None:
        self.routes.append(route)
        route.on_message(lambda text: self.heard.append(json.loads(text)))

    def say(self, kind: str, number: int | None = None, at: str = NOW) -> None:
        """Send one message on the newest connection and let the page take it."""
        self.routes[-1].send(json.dumps({"t": kind, "n": number, "at": at}))
        self.page.wait_for_timeout(30)

    def seen(self) -> list[list[Any]]:
        """What reached the page's callbacks."""
        seen: list[list[Any]] = self.page.evaluate("window.seen")
        return seen

    def wait_for_connections(self, count: int) -> None:
        """Let the page's clock run until it has connected so often."""
        for _ in range(80):
            if len(self.routes) >= count:
                return
            self.page.clock.run_for(1000)
            self.page.wait_for_timeout(10)
        raise AssertionError(f"{len(self.routes)} connections, not {count}")


@pytest.fixture
def peer(visit: Callable[..., Page]) -> Peer:
    page = visit("/help/")
    peer = Peer(page)
    page.clock.install(time=NOW)
    page.goto("/design/")
    page.evaluate(START, "/ws/sample/")
    peer.wait_for_connections(1)
    page.wait_for_timeout(50)
    return peer


def test_deltas_follow_the_snapshot_by_number(peer: Peer) -> None:
    peer.say("delta", 7)  # before any snapshot: nothing to add it to
    peer.say("snapshot", 10)
    peer.say("delta", 11)
    peer.say("delta", 11)  # delivered twice
    peer.say("delta", 12)
    assert peer.seen() == [["snapshot", 10], ["delta", 11], ["delta", 12]]
    expect(peer.page.locator("[data-live-state]")).to_contain_text("Live · 14:03:12")


def test_a_gap_asks_for_a_new_snapshot_and_applies_nothing_until_then(peer: Peer) -> None:
    peer.say("snapshot", 1)
    peer.say("delta", 3)
    peer.say("delta", 4)
    assert peer.seen() == [["snapshot", 1]]
    assert peer.heard == [{"t": "resync"}]
    peer.say("snapshot", 5)
    peer.say("delta", 6)
    assert peer.seen()[1:] == [["snapshot", 5], ["delta", 6]]


def test_stale_data_names_its_moment(peer: Peer) -> None:
    peer.say("snapshot", 1)
    for _ in range(5):  # the peer is alive, its data is not renewed
        peer.page.clock.run_for(6000)
        peer.say("beat", None)
    indicator = peer.page.locator("[data-live-state]")
    expect(indicator).to_have_attribute("data-s", "stale")
    expect(indicator).to_contain_text("Stale · data from 14:03:12")


def test_a_lost_connection_is_said_and_made_again(peer: Peer) -> None:
    peer.say("snapshot", 1)
    peer.routes[-1].close(code=1012)
    peer.page.wait_for_timeout(50)
    expect(peer.page.locator("[data-live-state]")).to_have_attribute("data-s", "off")
    peer.wait_for_connections(2)
    peer.page.wait_for_timeout(50)
    peer.say("delta", 2)  # the new connection owes a snapshot first
    peer.say("snapshot", 9, "2026-06-16T06:03:40Z")
    assert peer.seen() == [["snapshot", 1], ["snapshot", 9]]
    assert peer.page.evaluate("window.states.at(-1)") == "live"


def test_silence_is_taken_for_a_dead_connection(peer: Peer) -> None:
    peer.say("snapshot", 1)
    peer.wait_for_connections(2)


def test_a_pause_freezes_the_picture_and_resuming_asks_for_a_whole_one(peer: Peer) -> None:
    peer.say("snapshot", 1)
    peer.page.evaluate("window.feed.pause()")
    peer.say("delta", 2)
    assert peer.seen() == [["snapshot", 1]]
    expect(peer.page.locator("[data-live-state]")).to_have_attribute("data-s", "paused")
    peer.page.evaluate("window.feed.resume()")
    peer.page.wait_for_timeout(30)
    assert peer.heard[-1] == {"t": "resync"}
    peer.say("snapshot", 3)
    assert peer.seen()[-1] == ["snapshot", 3]


def test_a_refusal_is_final(peer: Peer) -> None:
    peer.routes[-1].close(code=4403)
    peer.page.wait_for_timeout(50)
    peer.page.clock.run_for(120_000)
    peer.page.wait_for_timeout(50)
    assert len(peer.routes) == 1
    expect(peer.page.locator("[data-live-state]")).to_have_attribute("data-s", "off")


def test_a_hidden_tab_rests_after_a_minute_and_comes_back_with_a_snapshot(peer: Peer) -> None:
    hide = "(on) => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => on });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    peer.say("snapshot", 1)
    peer.page.evaluate(hide, True)
    for _ in range(6):
        peer.page.clock.run_for(9_500)
        peer.say("beat", None)
    assert len(peer.routes) == 1  # not yet
    peer.page.clock.run_for(5_000)
    peer.page.wait_for_timeout(50)
    peer.page.clock.run_for(120_000)
    peer.page.wait_for_timeout(50)
    assert len(peer.routes) == 1  # it rests, and asks for nothing
    peer.page.evaluate(hide, False)
    peer.wait_for_connections(2)
    peer.page.wait_for_timeout(50)
    peer.say("snapshot", 44)
    assert peer.seen() == [["snapshot", 1], ["snapshot", 44]]


def test_the_address_of_a_socket_keeps_prefix_and_security(peer: Peer) -> None:
    script = """async () => {
      const app = document.querySelector('script[type=module]').src;
      const { socketUrl } = await import(app.replace('app.mjs', 'live.mjs'));
      return socketUrl('/gpu/pool/ws/wall/');
    }"""
    assert (
        peer.page.evaluate(script).removeprefix("ws://127.0.0.1:").lstrip("0123456789")
        == "/gpu/pool/ws/wall/"
    )
