// Draws the tiles of one node on its canvas, as static/css/figures.css draws them in HTML.
import { token } from './palette.mjs';
import { NA, NA16 } from './wall-frames.mjs';

export const TILE_H = 38;
const GAP = 2;
const CUTS = { busy: [1, 20, 40, 60, 80], sm: [1, 20, 40, 60, 80], mem: [5, 20, 40, 60, 80], temp: [40, 50, 60, 70, 80], power: [15, 30, 50, 70, 85] };
const paths = new Map();

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

let hatch = null;
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
export function forgetColours() { hatch = null; }

/** The value of a cell in the chosen measure: a number, or null for N/A. `state` shows the busy time. */
export function valueOf(data, i, measure) {
  const v = data[measure === 'state' ? 'busy' : measure][i];
  return v === (measure === 'power' ? NA16 : NA) ? null : v;
}

function heat(data, i, measure, limit) {
  const v = valueOf(data, i, measure);
  if (v === null) return null;
  const x = measure === 'power' ? (limit ? (v * 100) / limit : 0) : v;
  const step = CUTS[measure].filter((c) => x >= c).length;
  return measure === 'temp' ? `--temp-${step}` : `--load-${step}`;
}

/** Where cell `k` of `n` tiles lies in a canvas of width `w`. */
export function place(k, n, w, perRow) {
  const width = (w - GAP * (perRow - 1)) / perRow;
  return { x: (k % perRow) * (width + GAP), y: Math.floor(k / perRow) * (TILE_H + GAP), w: width, h: TILE_H };
}
export const rowsHeight = (n, perRow) => Math.ceil(n / perRow) * (TILE_H + GAP) - GAP;

/**
 * Draw the cards of one node. `cards`: [{i, number, slices: [{i, start, size}], limit, dim}]; `look(code)` →
 * {name, tone, icon, short}; options: measure, focus (index of the card with the ring), words, fonts.
 */
export function drawNode(canvas, cards, data, look, options) {
  const { measure, focus, words, fonts, perRow } = options;
  const ratio = Math.min(3, globalThis.devicePixelRatio || 1);
  const w = canvas.clientWidth, h = rowsHeight(cards.length, perRow);
  if (!w) return;
  if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(h * ratio)) {
    canvas.width = Math.round(w * ratio); canvas.height = Math.round(h * ratio);
  }
  const c = canvas.getContext('2d');
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, w, h);
  cards.forEach((card, k) => {
    const box = place(k, cards.length, w, perRow);
    const s = look(data.state[card.i]);
    const step = measure === 'state' || s.name === 'split' ? null : heat(data, card.i, measure, card.limit);
    let back = token(`--${s.tone}-soft`), fore = token(`--${s.tone}-ink`), border = null;
    if (s.name === 'free') { back = token('--surface'); fore = token('--ink-2'); border = token('--line-control'); }
    else if (s.name === 'split') { back = token('--sunken'); fore = token('--ink-2'); border = token('--line-strong'); }
    else if (s.name === 'no_data') { back = hatched(c); fore = token('--mute-ink'); }
    else if (['fault', 'lost', 'no_lease', 'suspect', 'reclaiming'].includes(s.name)) border = token(`--${s.tone}-solid`);
    if (step) { back = token(step); fore = token(`${step}-ink`); border = null; }
    c.globalAlpha = card.dim ? 0.18 : data.flags[card.i] & 1 ? 0.6 : 1;
    c.beginPath(); c.roundRect(box.x, box.y, box.w, box.h, 3);
    c.fillStyle = back; c.fill();
    if (border) { c.beginPath(); c.roundRect(box.x + 0.5, box.y + 0.5, box.w - 1, box.h - 1, 3); c.strokeStyle = border; c.lineWidth = 1; c.stroke(); }
    c.save();
    c.translate(box.x + 3, box.y + 4); c.scale(11 / 24, 11 / 24);
    c.strokeStyle = fore; c.lineWidth = 2.5; c.lineCap = 'round'; c.lineJoin = 'round'; c.stroke(icon(s.icon));
    c.restore();
    c.fillStyle = fore; c.textBaseline = 'alphabetic'; c.textAlign = 'right';
    const v = valueOf(data, card.i, measure);
    c.font = fonts.value;
    if (s.name === 'split') {
      const held = card.slices.filter((p) => ['in_use', 'idle', 'starting', 'reserved'].includes(look(data.state[p.i]).name));
      c.fillText(`${held.length}/${card.slices.length}`, box.x + box.w - 3, box.y + 14);
      drawSlices(c, card, data, look, box);
    } else {
      c.fillText(v === null ? words.na : String(v), box.x + box.w - 3, box.y + 14);
      c.textAlign = 'left'; c.font = fonts.word;
      c.fillText(fitted(c, s.short, box.w - 5), box.x + 3, box.y + box.h - 6);
    }
    c.globalAlpha = 1;
    if (focus === k) { c.beginPath(); c.roundRect(box.x + 1, box.y + 1, box.w - 2, box.h - 2, 3); c.strokeStyle = token('--ink'); c.lineWidth = 2; c.stroke(); }
  });
}

function drawSlices(c, card, data, look, box) {
  const y = box.y + box.h - 15, height = 11, slot = (box.w - 6) / card.slots;
  c.strokeStyle = token('--mute-solid'); c.lineWidth = 1;
  // What no slice covers is stranded: hatched, so that it survives without colour
  c.save(); c.beginPath(); c.rect(box.x + 3, y, box.w - 6, height); c.clip();
  c.beginPath();
  for (let x = box.x - height; x < box.x + box.w; x += 3) { c.moveTo(x, y + height); c.lineTo(x + height, y); }
  c.stroke(); c.restore();
  for (const part of card.slices) {
    const s = look(data.state[part.i]);
    const x = box.x + 3 + part.start * slot, w = part.size * slot - 1;
    const empty = s.name === 'free' || s.name === 'no_data';
    c.fillStyle = empty ? token('--surface') : token(`--${s.tone}-solid`);
    c.fillRect(x, y, w, height);
    if (empty) { c.strokeStyle = token('--line-control'); c.strokeRect(x + 0.5, y + 0.5, w - 1, height - 1); }
  }
}

function fitted(c, text, width) {
  if (c.measureText(text).width <= width) return text;
  let cut = text;
  while (cut.length > 1 && c.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return `${cut}…`;
}
