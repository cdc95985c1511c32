"""What scripts of pages reckon by themselves: how long a feed waits before it connects again, and how a chart draws the
night in which the clocks go back, and which tiles of the wall have a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

RECONNECTS = """async () => {
  const { connect } = await import(document.querySelector('script[type=module]').src.replace('app.mjs', 'live.mjs'));
  const kept = [window.WebSocket, window.setTimeout, Math.random];
  const out = [];
  let socket, later, waits;
  window.WebSocket = class {
    static OPEN = 1;
    constructor() { socket = this; this.readyState = 0; }
    close() {}
    send() {}
  };
  window.setTimeout = (run, ms) => { waits.push(Math.round(ms)); later = run; return 0; };
  for (const chance of [0, 0.5, 1]) {
    waits = [];
    Math.random = () => chance;
    const feed = connect('/ws/sample/');
    for (let i = 0; i < 8; i += 1) { socket.onclose({ code: 1012 }); later(); }
    socket.onmessage({ data: JSON.stringify({ t: 'snapshot', n: 1, at: Date.now() }) });
    socket.onclose({ code: 1012 });
    feed.close();
    out.push(waits);
  }
  [window.WebSocket, window.setTimeout, Math.random] = kept;
  return out;
}"""
DRAWN = """async (moments) => {
  const { draw } = await import(document.querySelector('script[type=module]').src.replace('app.mjs', 'charts.mjs'));
  const root = document.documentElement, zone = root.dataset.zone, plotly = globalThis.Plotly;
  root.dataset.zone = 'Europe/Berlin';
  let drawn;
  globalThis.Plotly = { react: (canvas, data) => { drawn = data; canvas.removeAllListeners = () => {}; } };
  const element = document.createElement('figure');
  element.innerHTML = '<div class="plot__box"><div class="plot__canvas"></div></div>'
    + '<div class="plot__twin" hidden></div>';
  const trace = { type: 'scatter', mode: 'lines', x: moments, y: moments.map((m, i) => i) };
  await draw(element, { data: [trace], layout: {} });
  globalThis.Plotly = plotly;
  root.dataset.zone = zone;
  return { x: drawn[0].x, y: drawn[0].y, gaps: drawn[0].connectgaps };
}"""

TILES = """async (measure) => {
  const app = document.querySelector('script[type=module]').src;
  const { drawNode, forgetColours } = await import(app.replace('app.mjs', 'wall-tiles.mjs'));
  const { columns } = await import(app.replace('app.mjs', 'wall-frames.mjs'));
  const states = ['no_data', 'lost', 'in_use', 'fault'];
  const data = columns(5);
  for (const name of ['busy', 'sm', 'mem', 'temp', 'power']) data[name].set([0, 0, 0, 0, data[name][4]]);
  data.state.set([0, 1, 2, 3, 2]);
  data.flags.set([5, 4, 0, 0, 0]);
  const proto = CanvasRenderingContext2D.prototype, own = globalThis.OffscreenCanvasRenderingContext2D?.prototype;
  const kept = [proto.fillText, own?.fillText], written = [];
  const keep = (text) => written.push(text);
  proto.fillText = keep; if (own) own.fillText = keep;
  const out = [];
  for (let i = 0; i < 5; i += 1) {
    const cards = [{ i, number: 0, slices: [], slots: 8, limit: 700 }];
    const node = { canvas: document.createElement('canvas'), width: 40, perRow: 1, cards };
    const look = (code) => ({ name: states[code], tone: 'mute', icon: 'nodata', short: '' });
    forgetColours(); // no picture of the tile before is taken
    written.length = 0;
    const fonts = { value: '12px sans-serif', word: '10px sans-serif' };
    drawNode(node, data, look, { measure, focus: -1, words: { na: 'N/A' }, fonts });
    out.push(written.filter(Boolean).join());
  }
  [proto.fillText] = kept; if (own) [, own.fillText] = kept;
  return out;
}"""


@pytest.fixture
def page(visit: Callable[..., Page]) -> Page:
    return visit("/help/")


def test_many_browsers_that_lost_one_server_come_back_at_different_times(page: Page) -> None:
    """Each wait is between a half and one and a half of its step; steps grow to 30 s and begin anew after data."""
    least, middle, most = page.evaluate(RECONNECTS)
    assert middle == [500, 1000, 2000, 4000, 8000, 15000, 30000, 30000, 500]
    assert least == [wait // 2 for wait in middle] and most == [wait * 3 // 2 for wait in middle]


def test_the_hour_that_comes_twice_is_not_drawn_backwards(page: Page) -> None:
    drawn = page.evaluate(
        DRAWN,
        ["2026-10-25T00:20:00Z", "2026-10-25T00:50:00Z", "2026-10-25T01:20:00Z", "2026-10-25T02:20:00Z"],
    )
    assert [x[11:16] for x in drawn["x"]] == ["02:20", "02:50", "02:50", "02:20", "03:20"]
    assert drawn["y"] == [0, 1, None, 2, 3] and drawn["gaps"] is False
    spring = page.evaluate(DRAWN, ["2026-03-29T00:30:00Z", "2026-03-29T01:30:00Z"])
    assert [x[11:16] for x in spring["x"]] == ["01:30", "03:30"] and spring["y"] == [0, 1]


@pytest.mark.parametrize("measure", ["state", "sm", "mem", "temp", "power"])
def test_a_tile_without_a_current_value_has_no_number(page: Page, measure: str) -> None:
    """No data, lost, in use, fault, in use without the measure; the first four with 0 in their columns."""
    assert page.evaluate(TILES, measure) == ["N/A", "N/A", "0", "0", "N/A"]
