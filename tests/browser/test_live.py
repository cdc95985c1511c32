"""The live feed of pages: snapshot and numbered deltas, gaps, silence, reconnecting, pausing, other people's doors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, WebSocketRoute, expect

START = """async (path) => {
  const Native = window.WebSocket;
  window.heard = window.begun = 0;
  window.WebSocket = class extends Native {
    constructor(...given) {
      super(...given);
      window.begun += 1;
      this.addEventListener('message', () => { window.heard += 1; });
    }
  };
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
BEFORE = "2026-06-16T05:03:12Z"
NOW = "2026-06-16T06:03:12Z"
PATIENCE_S = 60


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
        """Send one message on the newest connection; the page has taken it when this returns."""
        before = self.page.evaluate("window.heard")
        self.routes[-1].send(json.dumps({"t": kind, "n": number, "at": at}))
        self.until(lambda: self.page.evaluate("window.heard") > before)

    def until(self, done: Callable[[], bool]) -> None:
        """Wait in real time, while the page's own clock stands still."""
        end = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < end
            self.page.wait_for_timeout(5)

    def connections(self) -> int:
        """How many connections the page has begun, also those that have not reached this end yet."""
        count: int = self.page.evaluate("window.begun")
        return count

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
    """A page whose clock stands at NOW and moves only when a test moves it."""
    page = visit("/help/")
    peer = Peer(page)
    page.clock.install(time=BEFORE)
    page.goto("/design/")
    page.clock.pause_at(NOW)
    page.evaluate(START, "/ws/sample/")
    peer.wait_for_connections(1)
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
    peer.until(lambda: peer.heard != [])
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
    expect(peer.page.locator("[data-live-state]")).to_have_attribute("data-s", "off")
    peer.wait_for_connections(2)
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
    peer.until(lambda: peer.heard != [])
    assert peer.heard[-1] == {"t": "resync"}
    peer.say("snapshot", 3)
    assert peer.seen()[-1] == ["snapshot", 3]


def test_a_refusal_is_final(peer: Peer) -> None:
    peer.routes[-1].close(code=4403)
    expect(peer.page.locator("[data-live-state]")).to_have_attribute("data-s", "off")
    peer.page.clock.run_for(120_000)
    assert peer.connections() == 1


def test_a_hidden_tab_rests_after_a_minute_and_comes_back_with_a_snapshot(peer: Peer) -> None:
    hide = "(on) => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => on });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    peer.say("snapshot", 1)
    peer.page.evaluate(hide, True)
    for _ in range(6):
        peer.page.clock.run_for(9_500)
        peer.say("beat", None)
    assert peer.connections() == 1  # not yet
    peer.page.clock.run_for(125_000)
    assert peer.connections() == 1  # it rests, and asks for nothing
    peer.page.evaluate(hide, False)
    peer.wait_for_connections(2)
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
