// Draws the tiles of one node on its canvas, as static/css/figures.css draws them in HTML. A tile is put together from two small
// pictures that are drawn once and kept (what stands behind, with icon and word; the value), because thousands of tiles share a few
// hundred of them. Edges lie on whole pixels of the screen, so that pictures stay sharp.
import { token } from './palette.mjs';
import { NA, NA16, SILENT } from './wall-frames.mjs';

export const TILE_H = 38;
const GAP = 2, VALUE_TOP = 2, VALUE_H = 16, VALUE_W = 36, BASELINE = 14;
const KEPT_MOST = 3000;
const CUTS = { busy: [1, 20, 40, 60, 80], sm: [1, 20, 40, 60, 80], mem: [5, 20, 40, 60, 80], temp: [40, 50, 60, 70, 80], power: [15, 30, 50, 70, 85] };
const EDGED = new Set(['fault', 'lost', 'no_lease', 'suspect', 'reclaiming']);
const TAKEN = new Set(['in_use', 'idle', 'starting', 'reserved']);
const paths = new Map();
const pictures = new Map();
let hatch = null;
let edition = 0;

/** Colours, fonts or words are not what they were: everything is drawn anew. */
export function forgetColours() { hatch = null; pictures.clear(); edition += 1; }

/** An icon of the page's symbols as one path in a 24 px box. */
function icon(name) {
  if (paths.has(name)) return paths.get(name);
  const path = new Path2D();
  for (const el of document.querySelectorAll(`#i-${name} > *`)) {
    const v = (key) => Number(el.getAttribute(key) || 0);
    if (el.localName === 'path') path.addPath(new Path2D(el.getAttribute('d')));
    else if (el.localName === 'circle') { path.moveTo(v('cx') + v('r'), v('cy')); path.arc(v('cx'), v('cy'), v('r'), 0, 7); }
    else if (el.localName === 'rect') path.roundRect(v('x'), v('y'), v('width'), v('height'), v('rx'));
  }
  paths.set(name, path);
  return path;
}

/** The hatch of "no data", in the present colours. */
function hatched(context) {
  if (hatch) return hatch;
  const tile = document.createElement('canvas');
  tile.width = 8; tile.height = 8;
  const c = tile.getContext('2d');
  c.fillStyle = token('--sunken'); c.fillRect(0, 0, 8, 8);
  c.strokeStyle = token('--mute-soft'); c.lineWidth = 3;
  c.beginPath();
  for (const x of [-8, 0, 8]) { c.moveTo(x, 8); c.lineTo(x + 8, 0); }
  c.stroke();
  hatch = context.createPattern(tile, 'repeat');
  return hatch;
}

/** A picture of `w` × `h` screen pixels that is drawn once, in CSS pixels, and kept under `key`. */
function picture(key, w, h, ratio, draw) {
  let kept = pictures.get(key);
  if (kept) return kept;
  if (pictures.size >= KEPT_MOST) pictures.clear();
  const own = globalThis.OffscreenCanvas ? new OffscreenCanvas(w, h) : Object.assign(document.createElement('canvas'), { width: w, height: h });
  const c = own.getContext('2d');
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  draw(c);
  kept = own.transferToImageBitmap ? own.transferToImageBitmap() : own;
  pictures.set(key, kept);
  return kept;
}

/** The value of a cell in the chosen measure: a number, or null for N/A. `state` shows the busy time. */
export function valueOf(data, i, measure) {
  const v = data[measure === 'state' ? 'busy' : measure][i];
  return v === (measure === 'power' ? NA16 : NA) ? null : v;
}

/** The step of the ramp that a value has, or −1 where the tile is coloured by its state. */
function heat(v, measure, limit) {
  if (v === null) return -1;
  const x = measure === 'power' ? (limit ? (v * 100) / limit : 0) : v;
  const cuts = CUTS[measure];
  let step = 0;
  while (step < 5 && x >= cuts[step]) step += 1;
  return step;
}

/** Where cell `k` of `n` tiles lies in a canvas of width `w`. */
export function place(k, n, w, perRow) {
  const width = (w - GAP * (perRow - 1)) / perRow;
  return { x: (k % perRow) * (width + GAP), y: Math.floor(k / perRow) * (TILE_H + GAP), w: width, h: TILE_H };
}
export const rowsHeight = (n, perRow) => Math.ceil(n / perRow) * (TILE_H + GAP) - GAP;

/** Background, border and ink of a tile. */
function colours(c, s, step, measure) {
  if (step >= 0) {
    const name = `--${measure === 'temp' ? 'temp' : 'load'}-${step}`;
    return { back: token(name), fore: token(`${name}-ink`), border: null };
  }
  if (s.name === 'free') return { back: token('--surface'), fore: token('--ink-2'), border: token('--line-control') };
  if (s.name === 'split') return { back: token('--sunken'), fore: token('--ink-2'), border: token('--line-strong') };
  if (s.name === 'no_data') return { back: c && hatched(c), fore: token('--mute-ink'), border: null };
  return { back: token(`--${s.tone}-soft`), fore: token(`--${s.tone}-ink`), border: EDGED.has(s.name) ? token(`--${s.tone}-solid`) : null };
}

function drawBack(c, s, step, measure, w, h, fonts) {
  const { back, fore, border } = colours(c, s, step, measure);
  c.beginPath(); c.roundRect(0, 0, w, h, 3);
  c.fillStyle = back; c.fill();
  if (border) { c.beginPath(); c.roundRect(0.5, 0.5, w - 1, h - 1, 3); c.strokeStyle = border; c.lineWidth = 1; c.stroke(); }
  c.save();
  c.translate(3, 4); c.scale(11 / 24, 11 / 24);
  c.strokeStyle = fore; c.lineWidth = 2.5; c.lineCap = 'round'; c.lineJoin = 'round'; c.stroke(icon(s.icon));
  c.restore();
  if (s.name === 'split') return;
  c.fillStyle = fore; c.textBaseline = 'alphabetic'; c.textAlign = 'left'; c.font = fonts.word;
  c.fillText(fitted(c, s.short, w - 5), 3, h - 6);
}

/**
 * Draw the cards of one node that look otherwise than when they were drawn last. `node`: {canvas, width (CSS px),
 * perRow, cards: [{i, number, slices: [{i, start, size}], limit, dim, drawn}]}; `look(code)` → {name, tone, icon, short}; options:
 * measure, focus (index of the card with the ring), words, fonts.
 */
export function drawNode(node, data, look, options) {
  const { canvas, cards, perRow, width } = node;
  const { measure, focus, words, fonts } = options;
  if (!width) return;
  const ratio = Math.min(3, globalThis.devicePixelRatio || 1);
  const W = Math.round(width * ratio), H = Math.round(rowsHeight(cards.length, perRow) * ratio);
  const sized = canvas.width !== W || canvas.height !== H;
  if (sized) { canvas.width = W; canvas.height = H; }
  const c = (node.context ??= canvas.getContext('2d'));
  const gap = GAP * ratio, wide = (W - gap * (perRow - 1)) / perRow, h = Math.round(TILE_H * ratio);
  for (let k = 0; k < cards.length; k += 1) {
    const card = cards[k], { i } = card;
    const s = look(data.state[i]), split = s.name === 'split';
    const v = data.flags[i] & SILENT ? null : valueOf(data, i, measure);
    const step = measure === 'state' || split ? -1 : heat(v, measure, card.limit);
    const alpha = card.dim ? 0.18 : data.flags[i] & 1 ? 0.6 : 1;
    let text = v === null ? words.na : String(v), parts = '';
    if (split) {
      let held = 0;
      for (const part of card.slices) {
        const { name } = look(data.state[part.i]);
        if (TAKEN.has(name)) held += 1;
        parts += `${name},`;
      }
      text = `${held}/${card.slices.length}`;
    }
    const drawn = `${s.name} ${step} ${text} ${alpha} ${focus === k} ${measure} ${edition} ${parts}`;
    if (!sized && card.drawn === drawn) continue;
    card.drawn = drawn;
    const left = (k % perRow) * (wide + gap);
    const x = Math.round(left), y = Math.round(Math.floor(k / perRow) * (TILE_H + GAP) * ratio), w = Math.round(left + wide) - x;
    c.setTransform(1, 0, 0, 1, 0, 0);
    if (!sized) c.clearRect(x, y, w, h);
    c.globalAlpha = alpha;
    const ramp = step < 0 ? '' : measure === 'temp' ? 'temp' : 'load';
    c.drawImage(picture(`${s.name} ${ramp}${step} ${w} ${ratio}`, w, h, ratio, (own) => drawBack(own, s, step, measure, w / ratio, TILE_H, fonts)), x, y);
    const { fore } = colours(null, s, step, measure);
    const room = Math.min(w, Math.round(VALUE_W * ratio));
    const value = picture(`${text} ${fore} ${room} ${ratio}`, room, Math.round(VALUE_H * ratio), ratio, (own) => {
      own.font = fonts.value; own.fillStyle = fore; own.textBaseline = 'alphabetic'; own.textAlign = 'right';
      own.fillText(text, room / ratio - 3, BASELINE - VALUE_TOP);
    });
    c.drawImage(value, x + w - room, y + Math.round(VALUE_TOP * ratio));
    if (split || focus === k) {
      c.setTransform(ratio, 0, 0, ratio, x, y);
      if (split) drawSlices(c, card, data, look, w / ratio);
      c.globalAlpha = 1;
      if (focus === k) { c.beginPath(); c.roundRect(1, 1, w / ratio - 2, TILE_H - 2, 3); c.strokeStyle = token('--ink'); c.lineWidth = 2; c.stroke(); }
    }
  }
}

/** The slices of a split card along the lower edge of its tile of width `w`. */
function drawSlices(c, card, data, look, w) {
  const y = TILE_H - 15, height = 11, slot = (w - 6) / card.slots;
  c.strokeStyle = token('--mute-solid'); c.lineWidth = 1;
  // What no slice covers is stranded: hatched, so that it survives without colour
  c.save(); c.beginPath(); c.rect(3, y, w - 6, height); c.clip();
  c.beginPath();
  for (let x = -height; x < w; x += 3) { c.moveTo(x, y + height); c.lineTo(x + height, y); }
  c.stroke(); c.restore();
  for (const part of card.slices) {
    const s = look(data.state[part.i]);
    const x = 3 + part.start * slot, size = part.size * slot - 1;
    const empty = s.name === 'free' || s.name === 'no_data';
    c.fillStyle = empty ? token('--surface') : token(`--${s.tone}-solid`);
    c.fillRect(x, y, size, height);
    if (empty) { c.strokeStyle = token('--line-control'); c.strokeRect(x + 0.5, y + 0.5, size - 1, height - 1); }
  }
}

function fitted(c, text, width) {
  if (c.measureText(text).width <= width) return text;
  let cut = text;
  while (cut.length > 1 && c.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return `${cut}…`;
}
