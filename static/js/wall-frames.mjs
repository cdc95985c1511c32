// Binary frames of the wall (version 1; monitoring/engine/frames.py describes them) into columns kept in index order.

export const NA = 255;
export const NA16 = 65535;
/** Flags of a cell: nothing measures it now (a number would be an old one); somebody has it, whatever its state is. */
export const SILENT = 4, TAKEN = 8;
const COLUMNS = ['state', 'flags', 'busy', 'sm', 'mem', 'temp'];

/** Columns for `n` cells, all measures N/A; `every` has all indexes. */
export function columns(n) {
  const out = { n, power: new Uint16Array(n).fill(NA16), every: new Uint32Array(n).map((_, k) => k) };
  for (const name of COLUMNS) out[name] = new Uint8Array(n).fill(name === 'state' || name === 'flags' ? 0 : NA);
  return out;
}

/** Head of a frame, with what live.mjs needs: t, n, at; identity is the version of the list of cells. */
export function decode(buffer) {
  const view = new DataView(buffer);
  if (view.getUint8(0) !== 1) return { t: 'unknown' };
  const t = ['snapshot', 'delta', 'beat'][view.getUint8(1)];
  return { t, identity: view.getUint32(4, true), n: Number(view.getBigUint64(8, true)), at: view.getFloat64(16, true), buffer };
}

/** Put a frame's cells into `into`; returns the indexes that changed, or null when the sizes do not fit. */
export function apply(message, into) {
  const { buffer, t } = message;
  const n = new DataView(buffer).getUint32(24, true);
  let offset = 28;
  let index = null;
  if (t === 'snapshot') {
    if (n !== into.n) return null;
  } else {
    index = new Uint32Array(buffer, offset, n);
    for (let k = 0; k < n; k += 1) if (index[k] >= into.n) return null;
    offset += 4 * n;
  }
  put(into.power, new Uint16Array(buffer, offset, n), index);
  offset += 2 * n;
  for (const name of COLUMNS) {
    put(into[name], new Uint8Array(buffer, offset, n), index);
    offset += n;
  }
  return index ?? into.every;
}

function put(target, source, index) {
  if (!index) target.set(source);
  else for (let k = 0; k < index.length; k += 1) target[index[k]] = source[k];
}
