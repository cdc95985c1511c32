// Live detail of some cards over one JSON feed: four moving lines (uPlot), or the live rows of a node's table.
import { connect, pauseButton } from './live.mjs';
import { onTheme, token } from './palette.mjs';

const KEEP_MS = 15 * 60 * 1000;
const HOLE_MS = 45000;
const MAX_LINES = 8;
const AT = 1, BUSY = 2, SM = 3, MEM = 4, TOTAL = 5, TEMP = 6, POWER = 7, STATE = 9, STALE = 10;
const KEYS = { busy: BUSY, mem: MEM, temp: TEMP, power: POWER };
const zone = () => document.documentElement.dataset.zone || undefined;
const fill = (text, values) => (text || '').replace(/\{(\w+)\}/g, (_, key) => values[key] ?? '');
const number = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat('en', { minimumFractionDigits: 1, maximumFractionDigits: 1 });

let plotter = null;
/** uPlot and its style, loaded once, when first needed. */
function uplot() {
  plotter ??= new Promise((done, failed) => {
    if (globalThis.uPlot) { done(globalThis.uPlot); return; }
    for (const path of ['../vendor/uplot.min.css', '../css/monitoring.css']) {
      const href = new URL(path, import.meta.url).href;
      if ([...document.styleSheets].some((s) => s.href === href)) continue;
      const link = document.createElement('link');
      link.rel = 'stylesheet'; link.href = href;
      document.head.append(link);
    }
    const script = document.createElement('script');
    script.src = new URL('../vendor/uplot.min.js', import.meta.url).href;
    script.onload = () => done(globalThis.uPlot);
    script.onerror = failed;
    document.head.append(script);
  });
  return plotter;
}

export function start(root) {
  const view = root.dataset.mode === 'table' ? new Table(root) : new Lines(root);
  const feed = connect(root.dataset.socket, {
    indicator: root.querySelector('[data-live-state]'), staleMs: 30000,
    onSnapshot: (m) => view.snapshot(m), onDelta: (m) => view.delta(m),
    onState: (s) => root.querySelector('.lines')?.toggleAttribute('data-stale', s === 'stale' || s === 'off'),
  });
  const pause = root.querySelector('[data-pause]');
  if (pause) pauseButton(pause, feed);
  // A fragment that htmx has taken away closes its feed
  new MutationObserver((_, me) => { if (!root.isConnected) { feed.close(); me.disconnect(); view.end?.(); } }).observe(document.body, { childList: true, subtree: true });
}

/** The same line with an empty point wherever samples were missing for a while: silence is a hole, not a straight line. */
function holed(line) {
  const out = Object.fromEntries(Object.keys(line).map((key) => [key, []]));
  line.t.forEach((at, k) => {
    if (k && at - line.t[k - 1] > HOLE_MS) for (const key of Object.keys(out)) out[key].push(key === 't' ? line.t[k - 1] + 1000 : null);
    for (const key of Object.keys(out)) out[key].push(line[key][k]);
  });
  return out;
}

class Cells {
  constructor(root) { this.root = root; this.cells = []; this.na = root.dataset.tNa; }

  snapshot(message) {
    this.cells = message.cells.map((c) => ({ ...c, line: holed(c.history) }));
    this.drawn?.();
  }

  delta(message) {
    for (const row of message.rows) {
      const cell = this.cells[row[0]];
      if (!cell) continue;
      const fresh = row[AT] && row[AT] > (cell.last?.[AT] ?? 0);
      cell.last = row;
      if (fresh) this.append(cell.line, row);
    }
    this.drawn?.();
  }

  append(line, row) {
    const push = (at, values) => { line.t.push(at); for (const key of Object.keys(values)) line[key].push(values[key]); };
    const last = line.t.at(-1);
    if (last && row[AT] - last > HOLE_MS) push(last + 1000, { busy: null, sm: null, mem: null, temp: null, power: null });
    push(row[AT], { busy: row[BUSY], sm: row[SM], mem: row[MEM], temp: row[TEMP], power: row[POWER] });
    const cut = row[AT] - KEEP_MS;
    let drop = 0;
    while (line.t[drop] < cut) drop += 1;
    if (drop > 60) for (const key of Object.keys(line)) line[key].splice(0, drop);
  }
}

class Lines extends Cells {
  constructor(root) {
    super(root);
    this.plots = {};
    this.resizer = new ResizeObserver(() => this.resize());
    this.off = onTheme(() => this.again());
    document.addEventListener('visibilitychange', () => { if (!document.hidden) this.drawn(); });
  }

  end() { this.resizer.disconnect(); for (const plot of Object.values(this.plots)) plot.destroy(); }

  again() { for (const plot of Object.values(this.plots)) plot.destroy(); this.plots = {}; this.drawn(); }

  resize() { for (const [key, plot] of Object.entries(this.plots)) { const box = this.box(key); plot.setSize({ width: box.clientWidth, height: box.clientHeight }); } }

  card(key) { return this.root.querySelector(`[data-line="${key}"]`); }

  box(key) { return this.card(key).querySelector('[data-plot]'); }

  drawn() {
    if (this.waiting || document.hidden) return;
    this.waiting = requestAnimationFrame(async () => {
      this.waiting = 0;
      this.words();
      const UPlot = await uplot();
      for (const key of Object.keys(KEYS)) this.draw(UPlot, key);
    });
  }

  last(key) { return this.cells.map((c) => c.last?.[KEYS[key]] ?? null); }

  /** The figure beside the title and the line under it, for one card or for several. */
  words() {
    const t = this.root.dataset, n = this.cells.length;
    for (const key of Object.keys(KEYS)) {
      const card = this.card(key), unit = card.dataset.unit;
      const all = this.last(key), known = all.filter((v) => v !== null);
      let value = null, sub = '';
      if (known.length) {
        const total = known.reduce((a, b) => a + b, 0);
        if (key === 'busy') value = number.format(total / known.length);
        else if (key === 'mem') value = one.format(total / 1024);
        else if (key === 'temp') value = number.format(Math.max(...known));
        else value = number.format(total);
      }
      if (n === 1) {
        const row = this.cells[0].last;
        if (key === 'busy') sub = row?.[SM] == null ? t.tOne : fill(t.tSm, { sm: number.format(row[SM]) });
        if (key === 'mem' && row?.[TOTAL]) sub = fill(t.tOf, { total: one.format(row[TOTAL] / 1024) });
        if (key === 'temp') sub = t.tCore;
        if (key === 'power') sub = t.tBoard + (this.cells[0].limit_w ? `; ${fill(t.tLimit, { total: number.format(this.cells[0].limit_w) })}` : '');
      } else if (known.length) {
        if (key === 'busy') { const low = Math.min(...known), who = this.cells[all.indexOf(low)]; sub = fill(t.tMean, { n: known.length, low: `${number.format(low)} %`, who: who.label }); }
        else sub = fill(key === 'temp' ? t.tTop : t.tSum, { n: known.length });
      }
      const shown = value === null ? this.na : `${value}\u00a0${unit}`;
      const strong = card.querySelector('[data-value]'), help = card.querySelector('[data-sub]');
      if (strong.textContent !== shown) strong.textContent = shown;
      strong.classList.toggle('na', value === null);
      if (help.textContent !== sub) help.textContent = sub || '\u00a0';
      card.querySelector('[data-plot]').setAttribute('aria-label', `${card.querySelector('h3').textContent}: ${shown}. ${sub}`);
    }
  }

  draw(UPlot, key) {
    const cells = this.cells.slice(0, MAX_LINES);
    if (!cells.length) return;
    const scale = key === 'mem' ? 1 / 1024 : 1;
    const tables = cells.map((c) => [c.line.t.map((x) => x / 1000), c.line[key].map((v) => (v === null ? null : v * scale))]);
    const data = tables.length === 1 ? tables[0] : UPlot.join(tables);
    const plot = this.plots[key];
    const end = Math.max(Date.now() / 1000, data[0].at(-1) ?? 0);
    this.window = [end - KEEP_MS / 1000, end];
    if (plot && plot.series.length === tables.length + 1) { plot.setData(data, false); plot.setScale('x', { min: this.window[0], max: this.window[1] }); return; }
    plot?.destroy();
    const box = this.box(key);
    box.replaceChildren();
    this.plots[key] = new UPlot(this.options(UPlot, key, cells, box), data, box);
    this.plots[key].setScale('x', { min: this.window[0], max: this.window[1] });
    this.resizer.observe(box);
  }

  options(UPlot, key, cells, box) {
    const ink = token('--ink-3'), line = token('--line');
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const limit = cells[0].limit_w, total = cells[0].last?.[TOTAL];
    const range = {
      busy: [0, 100], temp: (u, low, high) => [Math.min(30, low ?? 30), Math.max(90, high ?? 90)],
      mem: (u, low, high) => [0, Math.max(total ? total / 1024 : 0, high ?? 1) || 1],
      power: (u, low, high) => [0, Math.max(limit ? limit * 1.1 : 0, (high ?? 100) * 1.1)],
    }[key];
    const single = cells.length === 1;
    const axis = { stroke: ink, font, grid: { stroke: line, width: 1 }, ticks: { show: false } };
    return {
      width: box.clientWidth || 300, height: box.clientHeight || 128, padding: [6, 18, 0, 0],  // right: half a label of the time axis
      tzDate: (ts) => UPlot.tzDate(new Date(ts * 1000), zone() ?? 'UTC'),
      cursor: { show: true, drag: { x: false, y: false }, points: { size: 5 } }, legend: { show: false },
      scales: { x: { time: true }, y: { range: typeof range === 'function' ? range : () => range } },
      axes: [
        { ...axis, grid: { show: false }, size: 28, gap: 8, space: 90, values: (u, ticks) => ticks.map((v) => new Date(v * 1000).toLocaleTimeString('en-GB', { hour: '2-digit', minute: '2-digit', timeZone: zone() })) },
        { ...axis, size: 38, gap: 4, space: 34 },
      ],
      series: [{}, ...cells.map((c, k) => ({
        label: c.label, stroke: single ? token('--series') : token(`--cat-${(k % 8) + 1}`), width: 1.5, spanGaps: false, points: { show: false },
        ...(single ? { fill: this.faded() } : {}),
      }))],
    };
  }

  faded() { return token('--accent-soft'); }
}

class Table extends Cells {
  constructor(root) {
    super(root);
    this.rows = [...root.querySelectorAll('[data-cell]')];
    this.looks = new Map([...root.querySelectorAll('template[data-look]')].map((t) => [t.dataset.look, t]));
  }

  drawn() {
    if (document.hidden) return;
    this.cells.forEach((cell, i) => {
      const row = this.rows[i];
      if (!row || !cell.last) return;
      row.toggleAttribute('data-stale', cell.last[STALE]);
      const put = (name, value, format) => {
        const td = row.querySelector(`[data-m="${name}"]`);
        // What is missing keeps the server's N/A with its reason
        if (value === null) { if (!td.querySelector('.na')) { td.innerHTML = '<span class="na"></span>'; td.firstChild.textContent = this.na; } return; }
        const text = format.format(value);
        if (td.textContent !== text) td.textContent = text;
      };
      put('busy', cell.last[BUSY], number);
      put('mem', cell.last[MEM] === null ? null : cell.last[MEM] / 1024, one);
      put('temp', cell.last[TEMP], number);
      put('power', cell.last[POWER], number);
      const state = row.querySelector('[data-m="state"]'), name = cell.last[STATE];
      if (state.dataset.now !== name && this.looks.has(name)) { state.replaceChildren(this.looks.get(name).content.cloneNode(true)); state.dataset.now = name; }
      this.spark(row.querySelector('svg.spark'), cell.line);
    });
  }

  spark(svg, line) {
    if (!svg) return;
    const end = Date.now(), n = line.t.length, stride = Math.max(1, Math.floor(n / 120));
    let path = '', pen = false;
    for (let k = 0; k < n; k += stride) {
      const v = line.busy[k];
      if (v === null || line.t[k] < end - KEEP_MS) { pen = false; continue; }
      path += `${pen ? 'L' : 'M'}${(100 * (1 - (end - line.t[k]) / KEEP_MS)).toFixed(2)} ${(100 - Math.min(100, v)).toFixed(1)}`;
      pen = true;
    }
    let el = svg.querySelector('path');
    if (!el) { el = document.createElementNS('http://www.w3.org/2000/svg', 'path'); el.setAttribute('class', 'ln'); svg.append(el); }
    el.setAttribute('d', path);
  }
}
