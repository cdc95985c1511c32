// The GPU wall: identity once, then binary frames; a canvas per visible node, one focus for the keyboard, a pop card as HTML.
import { connect, pauseButton } from './live.mjs';
import { onTheme } from './palette.mjs';
import { apply, columns, decode, NA, SILENT, TAKEN } from './wall-frames.mjs';
import { drawNode, forgetColours, place, rowsHeight, TILE_H } from './wall-tiles.mjs';

const ZERO = '00000000-0000-0000-0000-000000000000';
const NOWHERE = 65535;
const LIST_EVERY_MS = 60000, HELD_EVERY_MS = 15000, CARD_KEEP_MS = 5000, COUNT_EVERY_MS = 900;
const HELD = new Set(['in_use', 'idle', 'starting', 'reserved', 'reclaiming', 'draining']);
const BAD = new Set(['fault', 'lost']), CLOSED = new Set(['maintenance', 'no_data', 'lost', 'fault']);
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (_, key) => values[key] ?? '');
const read = (id) => JSON.parse(document.getElementById(id).textContent);

export function start(root) { new Wall(root).begin(); }

class Wall {
  constructor(root) {
    this.root = root;
    this.words = read('wall-words');
    this.looks = read('wall-looks');
    this.measure = root.dataset.measure;
    this.stateFilter = root.dataset.state;
    this.card = document.getElementById('wall-card');
    this.nodes = [];
    this.cells = [];
    this.data = columns(0);
    this.tag = null;
    this.held = null;
    this.focus = null;
    this.visible = new Set();
    this.dirty = new Set();
    this.unsized = new Set();
    this.links = null;
    this.cards = new Map();
    this.number = new Intl.NumberFormat('en');
  }

  async begin() {
    await this.list();
    this.observe();
    this.listen();
    const feedOptions = {
      indicator: document.querySelector('[data-live-state]'), decode, staleMs: 30000,
      onSnapshot: (m) => this.frame(m), onDelta: (m) => this.frame(m), onState: (s, d) => this.stale(s, d),
    };
    this.feed = connect(this.root.dataset.socket, feedOptions);
    const pause = document.getElementById('wall-pause');
    if (pause) pauseButton(pause, this.feed);
    if (this.root.dataset.held) { await this.loadHeld(); setInterval(() => this.loadHeld(), HELD_EVERY_MS); }
    setInterval(() => { if (!document.hidden) this.list(); }, LIST_EVERY_MS);
    const again = () => { this.fonts = null; forgetColours(); this.all(); };
    onTheme(again);
    document.fonts?.addEventListener('loadingdone', again);
  }

  // The list of cells -------------------------------------------------------------------------------------

  async list() {
    try {
      const answer = await fetch(this.root.dataset.cells, { headers: this.tag ? { 'If-None-Match': this.tag } : {}, credentials: 'same-origin', cache: 'no-store' });
      if (answer.status === 304) return;
      if (!answer.ok) throw new Error(String(answer.status));
      this.tag = answer.headers.get('ETag');
      const list = await answer.json();
      const same = this.identity === list.version;
      this.identity = list.version;
      this.states = list.states.map((name) => {
        const [tone, icon, label] = this.looks[name] ?? ['mute', 'nodata', name];
        return { name, tone, icon, label, short: this.words.short[name] ?? label, held: HELD.has(name), bad: BAD.has(name), closed: CLOSED.has(name) };
      });
      if (!same) { this.build(list); this.feed?.send({ t: 'resync' }); }
    } catch {
      if (!this.identity) { this.root.replaceChildren(this.note(this.words.failed)); setTimeout(() => this.list(), 3000); }
    }
  }

  note(text) {
    const p = document.createElement('p');
    p.className = 'blank'; p.textContent = text;
    return p;
  }

  build(list) {
    const { site, model, q } = this.root.dataset;
    let i = 0;
    this.nodes = []; this.cells = []; this.visible.clear(); this.dirty.clear(); this.unsized.clear();
    const sites = new Map();
    for (const [siteAt, modelAt, uid, name, decided, cards] of list.nodes) {
      const node = { uid, name, decided, site: siteAt, model: modelAt, cards: [] };
      for (const [number, gpu, limit, slices, slots] of cards) {
        const card = { i, number, gpu, limit, node, slots: slots ?? 8, slices: [] };
        this.cells[i] = card; i += 1;
        for (const [profile, begin, size] of slices ?? []) { card.slices.push({ i, profile, start: begin, size }); this.cells[i] = card; i += 1; }
        node.cards.push(card);
      }
      if (site && list.sites[siteAt][0] !== site) continue;
      if (model && list.models[modelAt] !== model) continue;
      if (q && !name.toLowerCase().includes(q.trim().toLowerCase())) continue;
      const sets = sites.get(siteAt) ?? sites.set(siteAt, new Map()).get(siteAt);
      (sets.get(modelAt) ?? sets.set(modelAt, []).get(modelAt)).push(node);
      this.nodes.push(node);
    }
    this.data = columns(i);
    this.setOf = new Uint16Array(i).fill(NOWHERE);
    this.sets = [];
    const out = document.createDocumentFragment();
    for (const [siteAt, sets] of sites) out.append(this.siteSection(list.sites[siteAt][1], [...sets].map(([m, nodes]) => [list.models[m], nodes])));
    if (!this.nodes.length) out.append(this.note(this.words.nothing));
    this.root.replaceChildren(out);
    this.observer?.disconnect();
    this.observe();
    this.focus = null;
  }

  siteSection(name, sets) {
    const section = document.createElement('section');
    section.className = 'wall__site'; section.setAttribute('aria-label', name);
    const nodes = sets.reduce((a, [, n]) => a + n.length, 0);
    const gpus = sets.reduce((a, [, n]) => a + n.reduce((b, x) => b + x.cards.length, 0), 0);
    section.innerHTML = '<header><h2></h2><span class="muted f13"></span></header>';
    section.querySelector('h2').textContent = name;
    section.querySelector('span').textContent = fill(nodes === 1 ? this.words.node : this.words.nodes, { nodes: this.number.format(nodes), gpus: this.number.format(gpus) });
    for (const [model, list] of sets) section.append(this.setSection(model, list));
    return section;
  }

  setSection(model, nodes) {
    const most = Math.max(...nodes.map((n) => n.cards.length));
    const section = document.createElement('section');
    section.className = 'wall__set'; section.setAttribute('aria-label', model);
    section.innerHTML = '<header><h3></h3><span></span><span></span><span></span><span></span></header><div class="wall__nodes"></div>';
    section.querySelector('h3').textContent = model;
    const spans = section.querySelectorAll('header > span');
    spans[0].textContent = fill(nodes.length === 1 ? this.words.node_of : this.words.nodes_of, { nodes: this.number.format(nodes.length), per: most });
    const box = section.querySelector('.wall__nodes');
    box.style.setProperty('--node-w', most > 4 ? '21.75rem' : '12rem');
    for (const node of nodes) box.append(this.nodeArticle(node, most));
    for (const node of nodes) for (const card of node.cards) this.setOf[card.i] = this.sets.length;
    this.sets.push({ spans });
    return section;
  }

  nodeArticle(node, most) {
    const article = document.createElement('article');
    article.className = 'node';
    const perRow = Math.min(8, Math.max(most, node.cards.length));
    node.perRow = perRow; node.article = article;
    article.innerHTML = '<header><a tabindex="-1"></a><span class="badge" hidden></span><span></span></header><canvas class="tiles-canvas" aria-hidden="true"></canvas>';
    const link = article.querySelector('a');
    link.textContent = node.name; link.href = this.root.dataset.node.replace(ZERO, node.uid);
    node.badge = article.querySelector('.badge');
    node.text = article.querySelector('header > span:last-child').appendChild(document.createTextNode(''));
    node.canvas = article.querySelector('canvas');
    node.canvas.style.setProperty('--h', `${rowsHeight(node.cards.length, perRow)}px`);
    article.wallNode = node;
    return article;
  }

  observe() {
    if (!this.nodes.length) return;
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const node = target.wallNode;
        if (isIntersecting) this.sees(node);
        else { this.visible.delete(node); node.canvas.width = 0; }
      }
      this.paint();
    }, { rootMargin: '400px 0px' });
    for (const node of this.nodes) this.observer.observe(node.article);
    this.resizer ??= new ResizeObserver(() => { for (const node of this.visible) this.unsized.add(node); this.all(); });
    this.resizer.observe(this.root);
  }

  sees(node) { this.visible.add(node); this.dirty.add(node); this.unsized.add(node); }

  // Frames ------------------------------------------------------------------------------------------------

  frame(message) {
    if (message.identity !== this.identity) {
      // A frame of another list of cells: fetch that list; a snapshot follows it
      if (performance.now() - (this.fetchedAt ?? -Infinity) > 2000) { this.fetchedAt = performance.now(); this.list(); }
      return;
    }
    const changed = apply(message, this.data);
    if (changed === null) return;
    // From one card to the next the node is mostly the same one
    let last = null;
    for (let k = 0; k < changed.length; k += 1) {
      const node = this.cells[changed[k]]?.node;
      if (node && node !== last && this.visible.has(node)) this.dirty.add(node);
      last = node;
    }
    this.paint();
    this.count();
  }

  stale(state, { at }) {
    const banner = document.getElementById('wall-stale');
    const bad = state === 'stale' || state === 'off';
    this.root.toggleAttribute('data-stale', bad);
    if (!banner) return;
    banner.hidden = !bad || !at;
    if (bad && at) {
      const span = banner.querySelector('span');
      const time = new Date(at).toLocaleTimeString('en-GB', { hour12: false, timeZone: document.documentElement.dataset.zone || undefined });
      span.textContent = fill(span.dataset[state === 'off' ? 'tOff' : 'tStale'], { time });
    }
  }

  look(code) { return this.states[code] ?? this.states[0]; }

  dims(card) {
    if (this.held && !this.held.has(card.i) && !card.slices.some((s) => this.held.has(s.i))) return true;
    if (!this.stateFilter) return false;
    return this.look(this.data.state[card.i]).name !== this.stateFilter && !card.slices.some((s) => this.look(this.data.state[s.i]).name === this.stateFilter);
  }

  all() { for (const node of this.visible) this.dirty.add(node); this.paint(); }

  paint() {
    if (this.painting || document.hidden) return;
    this.painting = requestAnimationFrame(() => {
      this.painting = 0;
      // All sizes are read before anything is written: a look at a size after a change has the whole page laid out
      for (const node of this.unsized) if (this.visible.has(node)) node.width = node.canvas.clientWidth;
      this.unsized.clear();
      if (!this.fonts) {
        const { fontFamily } = getComputedStyle(document.body);
        this.fonts = { value: `500 12px ${fontFamily}`, word: `10.5px ${fontFamily}` };
      }
      for (const node of this.dirty) if (this.visible.has(node)) this.drawNode(node);
      this.dirty.clear();
    });
  }

  drawNode(node) {
    for (const card of node.cards) card.dim = this.dims(card);
    const focus = this.focus?.node === node ? node.cards.indexOf(this.focus) : -1;
    const options = { measure: this.measure, focus, words: this.words, fonts: this.fonts };
    drawNode(node, this.data, (code) => this.look(code), options);
    let free = 0, busy = 0, sum = 0, closed = true;
    for (const card of node.cards) {
      const { name, held, closed: shut } = this.look(this.data.state[card.i]), v = this.data.busy[card.i];
      if (name === 'free') free += 1;
      if (held && v !== NA) { busy += 1; sum += v; }
      closed &&= shut;
    }
    const mean = busy ? `${Math.round(sum / busy)} %` : this.words.na;
    const text = closed ? this.words.na : `${mean} · ${free ? fill(this.words.free, { n: free }) : this.words.full}`;
    if (node.text.data !== text) node.text.data = text;
    this.badge(node);
  }

  badge(node) {
    const names = node.cards.map((card) => this.look(this.data.state[card.i]).name);
    const faults = names.filter((name) => BAD.has(name)).length;
    const state = names.every((n) => n === 'maintenance') ? 'maintenance' : node.decided === 'draining' || names.includes('draining') ? 'draining' : node.decided === 'cordoned' ? 'cordoned' : faults ? 'fault' : '';
    const key = `${state}${faults}`;
    if (node.badgeKey === key) return;
    node.badgeKey = key;
    node.badge.hidden = !state;
    if (!state) { delete node.article.dataset.tone; return; }
    const [tone, icon, label] = this.looks[state];
    node.article.dataset.tone = tone; node.badge.dataset.tone = tone;
    const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
    svg.setAttribute('class', 'i'); svg.setAttribute('aria-hidden', 'true');
    const use = document.createElementNS('http://www.w3.org/2000/svg', 'use');
    use.setAttribute('href', `#i-${icon}`); svg.append(use);
    const text = state === 'fault' ? (faults === 1 ? this.words.faults_one : fill(this.words.faults, { n: faults })) : label;
    node.badge.replaceChildren(svg, text);
  }

  // Counts in the key and in the heads of sets -----------------------------------------------------------

  count() {
    const now = performance.now();
    if (this.countedAt && now - this.countedAt < COUNT_EVERY_MS) {
      // The last frame of a burst counts, too
      this.counting ??= setTimeout(() => this.count(), COUNT_EVERY_MS);
      return;
    }
    clearTimeout(this.counting); this.counting = null;
    this.countedAt = now;
    const { data, states } = this, width = states.length;
    const cards = new Uint32Array(this.sets.length * width), sets = this.sets.map(() => ({ all: 0, held: 0, told: 0, by: 0, sum: 0 }));
    for (let i = 0; i < data.n; i += 1) {
      if (this.setOf[i] === NOWHERE) continue;
      const set = sets[this.setOf[i]], busy = data.busy[i], flags = data.flags[i];
      cards[this.setOf[i] * width + (data.state[i] < width ? data.state[i] : 0)] += 1;
      set.all += 1;
      if (!(flags & SILENT)) set.told += 1;
      if (flags & TAKEN) { set.held += 1; if (busy !== NA) { set.by += 1; set.sum += busy; } }
    }
    const n = (x) => this.number.format(x), counts = new Map();
    this.sets.forEach(({ spans }, k) => {
      const { all, held, told, by, sum } = sets[k];
      let free = 0;
      states.forEach(({ name }, code) => {
        const found = cards[k * width + code];
        if (!found) return;
        counts.set(name, (counts.get(name) ?? 0) + found);
        if (name === 'free') free = found;
      });
      const texts = [fill(this.words.allocated, { held: n(held), all: n(all), free: n(free) }),
        by ? fill(this.words.mean, { mean: Math.round(sum / by) }) : this.words.mean_na,
        fill(this.words.data, { some: n(told), all: n(all) })];
      texts.forEach((t, at) => { if (spans[at + 1].textContent !== t) spans[at + 1].textContent = t; });
    });
    this.links ??= [...document.querySelectorAll('#wall-key [data-state]')].map((link) => ({ link, figure: link.querySelector('b') }));
    for (const { link, figure } of this.links) {
      const found = counts.get(link.dataset.state) ?? 0, text = n(found), hidden = !found && link.dataset.state !== this.stateFilter;
      if (figure.textContent !== text) figure.textContent = text;
      if (link.hidden !== hidden) link.hidden = hidden;
    }
  }

  async loadHeld() {
    try {
      const answer = await (await fetch(this.root.dataset.held, { credentials: 'same-origin' })).json();
      if (answer.version === this.identity) { this.held = new Set(answer.cells); this.all(); }
    } catch { /* the next round asks again */ }
  }

  // Acts --------------------------------------------------------------------------------------------------

  listen() {
    const { root } = this;
    root.addEventListener('pointermove', (e) => { if (e.pointerType !== 'touch') this.hover(this.hit(e)); });
    root.addEventListener('pointerleave', (e) => { if (!this.card.contains(e.relatedTarget)) this.hide(); });
    this.card.addEventListener('pointerleave', () => this.hide());
    root.addEventListener('click', (e) => {
      const card = this.hit(e);
      if (!card) return;
      if (matchMedia('(hover: none)').matches) this.select(card); else location.assign(this.gpuUrl(card));
    });
    root.addEventListener('keydown', (e) => this.key(e));
    root.addEventListener('focus', () => { if (!this.focus && root.matches(':focus-visible')) this.select([...this.visible][0]?.cards[0] ?? this.nodes[0]?.cards[0]); });
    root.addEventListener('blur', (e) => { if (!this.card.contains(e.relatedTarget)) { this.hide(); this.unfocus(); } });
    document.addEventListener('visibilitychange', () => { if (!document.hidden) this.all(); });
    for (const link of document.querySelectorAll('#wall-measures [data-measure]')) link.addEventListener('click', (e) => { e.preventDefault(); this.setMeasure(link); });
    window.addEventListener('popstate', () => location.reload());
    document.addEventListener('pointerdown', (e) => { if (!root.contains(e.target) && !this.card.contains(e.target)) this.hide(); });
  }

  setMeasure(link) {
    this.measure = link.dataset.measure;
    this.root.dataset.measure = this.measure;
    for (const other of document.querySelectorAll('#wall-measures [data-measure]')) {
      if (other === link) other.setAttribute('aria-current', 'true'); else other.removeAttribute('aria-current');
    }
    for (const ramp of document.querySelectorAll('#wall-legend [data-ramp]')) ramp.hidden = ramp.dataset.ramp !== this.measure;
    const url = new URL(location.href);
    if (this.measure === 'state') url.searchParams.delete('measure'); else url.searchParams.set('measure', this.measure);
    history.replaceState(history.state, '', url);
    const kept = document.querySelector('form.filters input[name=measure]');
    if (kept) kept.value = this.measure === 'state' ? '' : this.measure;
    this.all();
  }

  gpuUrl(card) { return this.root.dataset.gpu.replace(ZERO, card.gpu); }

  hit(event) {
    const canvas = event.target.closest?.('canvas');
    const node = canvas?.parentElement.wallNode;
    if (!node) return null;
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    return node.cards.find((_, k) => { const p = place(k, node.cards.length, box.width, node.perRow); return x >= p.x && x <= p.x + p.w && y >= p.y && y <= p.y + p.h; }) ?? null;
  }

  hover(card) {
    this.root.style.setProperty('cursor', card ? 'pointer' : '');
    if (card === this.hovered) return;
    this.hovered = card;
    clearTimeout(this.hoverTimer);
    if (card) this.hoverTimer = setTimeout(() => this.show(card), 150);
    else this.hoverTimer = setTimeout(() => { if (!this.card.matches(':hover')) this.hide(); }, 200);
  }

  unfocus() { const old = this.focus; this.focus = null; if (old) { this.dirty.add(old.node); this.paint(); } }

  select(card) {
    if (!card) return;
    const old = this.focus;
    this.focus = card;
    if (old) this.dirty.add(old.node);
    this.sees(card.node);
    card.node.article.scrollIntoView({ block: 'nearest' });
    this.paint();
    this.show(card);
  }

  key(e) {
    if (e.target !== this.root) return;
    const { focus } = this;
    if (e.key === 'Escape') { this.hide(); return; }
    if (!focus) { if (e.key.startsWith('Arrow')) { e.preventDefault(); this.select(this.nodes[0]?.cards[0]); } return; }
    if (e.key === 'Enter') { location.assign(this.gpuUrl(focus)); return; }
    if (e.key === 'n' || e.key === 'N') { location.assign(this.root.dataset.node.replace(ZERO, focus.node.uid)); return; }
    if (e.key === 'l' || e.key === 'L') { const link = this.card.querySelector('[data-key=l]'); if (link) location.assign(link.href); return; }
    const next = this.step(e.key);
    if (next) { e.preventDefault(); this.select(next); }
  }

  step(key) {
    const { node } = this.focus, k = node.cards.indexOf(this.focus), at = this.nodes.indexOf(node);
    if (key === 'Home') return this.nodes[0].cards[0];
    if (key === 'End') return this.nodes.at(-1).cards.at(-1);
    if (key === 'ArrowRight') return node.cards[k + 1] ?? this.nodes[at + 1]?.cards[0];
    if (key === 'ArrowLeft') return node.cards[k - 1] ?? this.nodes[at - 1]?.cards.at(-1);
    if (key !== 'ArrowDown' && key !== 'ArrowUp') return null;
    const down = key === 'ArrowDown';
    const inside = node.cards[k + (down ? node.perRow : -node.perRow)];
    if (inside) return inside;
    // The nearest node in the row above or below on the screen
    const box = node.article.getBoundingClientRect(), middle = box.left + ((k % node.perRow) + 0.5) * (box.width / node.perRow);
    let best = null, bestRow = Infinity, bestOff = Infinity;
    for (const other of this.nodes) {
      const b = other.article.getBoundingClientRect();
      const row = down ? b.top - box.bottom : box.top - b.bottom;
      if (row < -2) continue;
      const off = middle < b.left ? b.left - middle : middle > b.right ? middle - b.right : 0;
      if (row < bestRow - 4 || (row < bestRow + 4 && off < bestOff)) { best = { other, b }; bestRow = row; bestOff = off; }
    }
    if (!best) return null;
    const column = Math.min(best.other.perRow - 1, Math.max(0, Math.floor(((middle - best.b.left) / best.b.width) * best.other.perRow)));
    const row = down ? 0 : Math.floor((best.other.cards.length - 1) / best.other.perRow);
    return best.other.cards[Math.min(best.other.cards.length - 1, row * best.other.perRow + column)];
  }

  // The pop card ------------------------------------------------------------------------------------------

  async show(card) {
    this.shown = card;
    const kept = this.cards.get(card.gpu);
    let html = kept && performance.now() - kept.at < CARD_KEEP_MS ? kept.html : null;
    if (!html) {
      try {
        const answer = await fetch(this.root.dataset.card.replace(ZERO, card.gpu), { headers: { 'HX-Request': 'true' }, credentials: 'same-origin' });
        if (!answer.ok) return;
        html = await answer.text();
        this.cards.set(card.gpu, { html, at: performance.now() });
        if (this.cards.size > 200) this.cards.delete(this.cards.keys().next().value);
      } catch { return; }
    }
    if (this.shown !== card) return;
    this.card.innerHTML = html;
    this.card.hidden = false;
    this.put(card);
  }

  put(card) {
    const box = card.node.canvas.getBoundingClientRect();
    const p = place(card.node.cards.indexOf(card), card.node.cards.length, box.width, card.node.perRow);
    const own = this.card.getBoundingClientRect();
    const host = this.card.offsetParent?.getBoundingClientRect() ?? { left: 0, top: 0 };
    let left = box.left + p.x;
    if (left + own.width > innerWidth - 12) left = Math.max(12, box.left + p.x + p.w - own.width);
    if (left + own.width > innerWidth - 4) left = Math.max(4, innerWidth - own.width - 4);
    let top = box.top + p.y + TILE_H + 6;
    if (top + own.height > innerHeight - 8 && box.top + p.y - own.height - 6 > 0) top = box.top + p.y - own.height - 6;
    this.card.style.setProperty('left', `${left - host.left}px`);
    this.card.style.setProperty('top', `${top - host.top}px`);
  }

  hide() { clearTimeout(this.hoverTimer); this.shown = null; this.hovered = null; this.card.hidden = true; }
}
