// Draws Plotly figures in theme colours, with a table twin. Texts come from the figure's data-t-* attributes.

const CATEGORIES = ['--cat-1', '--cat-2', '--cat-3', '--cat-4', '--cat-5', '--cat-6', '--cat-7', '--cat-8'];
const config = { displayModeBar: false, responsive: true, showTips: false, doubleClick: 'reset' };

/** A colour token as the browser resolves it now (light-dark() included). */
export function colour(token) {
  const probe = document.createElement('span');
  probe.style.setProperty('color', `var(${token})`);
  probe.hidden = true;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

/** The same object with every string that starts with "--" replaced by its colour. */
function paint(value) {
  if (typeof value === 'string') return value.startsWith('--') ? colour(value) : value;
  if (Array.isArray(value)) return value.length && typeof value[0] !== 'object' && typeof value[0] !== 'string' ? value : value.map(paint);
  if (value && typeof value === 'object') return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, paint(v)]));
  return value;
}

function baseLayout() {
  const ink = colour('--ink-2'), line = colour('--line'), strong = colour('--line-strong');
  const axis = { gridcolor: line, linecolor: strong, zerolinecolor: line, tickcolor: strong, automargin: true, fixedrange: true };
  return {
    autosize: true,
    margin: { l: 8, r: 12, t: 14, b: 8 },
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
    colorway: CATEGORIES.map(colour),
    xaxis: { ...axis, showgrid: false },
    yaxis: { ...axis, rangemode: 'tozero' },
    legend: { orientation: 'h', x: 0, y: -0.18, yanchor: 'top' },
    hovermode: 'x unified',
    hoverlabel: { bgcolor: colour('--raised'), bordercolor: strong, font: { color: colour('--ink'), size: 12 } },
    transition: { duration: 0 },
  };
}

/** Ticks of a time axis in the reader's words: Plotly's own are American. */
function timeTicks() {
  const chinese = document.documentElement.lang.startsWith('zh');
  const day = chinese ? '%-m月%-d日' : '%-d %b', month = chinese ? '%Y年%-m月' : '%b %Y';
  return [
    { dtickrange: [null, 60000], value: '%H:%M:%S' },
    { dtickrange: [60000, 86400000], value: `%H:%M\n${day}` },
    { dtickrange: [86400000, 'M1'], value: day },
    { dtickrange: ['M1', null], value: month },
  ];
}

function merge(base, over) {
  const out = { ...base };
  for (const [key, value] of Object.entries(over ?? {})) {
    out[key] = value && typeof value === 'object' && !Array.isArray(value) ? merge(base[key] ?? {}, value) : value;
  }
  return out;
}

/** Times in the reader's zone: Plotly draws what it is given, so UTC moments are shifted to wall time first. */
function zoned(figure, zone) {
  if (!zone) return figure;
  const iso = /^\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)$/;
  const form = new Intl.DateTimeFormat('sv-SE', { timeZone: zone, dateStyle: 'short', timeStyle: 'medium' });
  const shift = (v) => (typeof v === 'string' && iso.test(v) ? form.format(new Date(v)) : v);
  return { ...figure, data: figure.data.map((t) => (Array.isArray(t.x) ? cutBack({ ...t, x: t.x.map(shift) }, t.x) : t)),
    layout: figure.layout?.xaxis?.range ? merge(figure.layout, { xaxis: { range: figure.layout.xaxis.range.map(shift) } }) : figure.layout };
}

/** When clocks go back an hour of the wall comes twice: a line is cut there instead of being drawn backwards. */
function cutBack(trace, moments) {
  const { x, y } = trace;
  const cut = new Set([...x.keys()].filter((i) => i && x[i] <= x[i - 1] && Date.parse(moments[i]) > Date.parse(moments[i - 1])));
  if (!cut.size || !Array.isArray(y) || trace.type === 'bar') return trace;
  const spread = (values, at) => values.flatMap((v, i) => (cut.has(i) ? [at(i), v] : [v]));
  return { ...trace, x: spread(x, (i) => x[i - 1]), y: spread(y, () => null) };
}

const isEmpty = (figure) => !figure.data?.length || figure.data.every((t) => !(t.y ?? t.z ?? t.values ?? t.x)?.length);

function cell(tag, text, className) {
  const el = document.createElement(tag);
  el.textContent = text ?? '–';
  if (className) el.className = className;
  return el;
}

/** The figures as a table: from `figure.table`, else from the traces by their x. `figure.links`: what each x, in the
 * order of the rows, leads to. */
function twin(box, figure, words) {
  let { head, rows } = figure.table ?? {};
  if (!head) {
    const traces = figure.data.filter((t) => Array.isArray(t.x));
    const xs = [...new Set(traces.flatMap((t) => t.x))];
    const index = traces.map((t) => new Map(t.x.map((x, i) => [x, t.y?.[i]])));
    head = [figure.layout?.xaxis?.title?.text ?? words.time, ...traces.map((t) => t.name ?? '')];
    rows = xs.map((x) => [x, ...index.map((m) => m.get(x) ?? null)]);
  }
  const table = document.createElement('table');
  table.className = 'table';
  table.dataset.dense = '';
  const top = table.createTHead().insertRow();
  head.forEach((h, i) => { const th = cell('th', h, i ? 'n' : ''); th.scope = 'col'; top.append(th); });
  const body = table.createTBody();
  for (const [at, row] of rows.entries()) {
    const tr = body.insertRow();
    row.forEach((v, i) => { const c = cell(i ? 'td' : 'th', v === null ? 'N/A' : v, i ? 'n' : 'nw'); if (!i) c.scope = 'row'; tr.append(c); });
    const to = figure.links?.to[at];
    if (to) {
      const link = cell('a', row[0]);
      link.href = to;
      tr.firstChild.replaceChildren(link);
    }
  }
  box.replaceChildren(table);
}

/** Draw a figure into a `figure[data-chart]` element. */
export async function draw(element, figure) {
  const canvas = element.querySelector('.plot__canvas');
  element.figure = figure;
  element.querySelector('.blank')?.remove();
  element.toggleAttribute('data-empty', isEmpty(figure));
  if (isEmpty(figure)) {
    globalThis.Plotly?.purge(canvas);
    const note = document.createElement('p');
    note.className = 'blank'; note.textContent = element.dataset.tEmpty;
    element.querySelector('.plot__box').append(note);
    return;
  }
  const shown = zoned(figure, document.documentElement.dataset.zone);
  const layout = merge(baseLayout(), paint(shown.layout ?? {}));
  if (layout.xaxis.type === 'date') layout.xaxis.tickformatstops ??= timeTicks();
  if (shown.data.length === 1 && shown.layout?.showlegend === undefined) layout.showlegend = false;
  const data = paint(shown.data).map((t, i) => (t.type === 'scatter' && !t.line?.color
    ? { ...t, line: { width: 1.75, ...t.line, color: shown.data.length === 1 ? colour('--series') : colour(CATEGORIES[i % 8]) }, connectgaps: false } : t));
  await globalThis.Plotly.react(canvas, data, layout, config);
  canvas.removeAllListeners?.('plotly_click');
  canvas.toggleAttribute('data-linked', Boolean(figure.links));
  if (figure.links) canvas.on('plotly_click', ({ points: [point] }) => {
    const to = figure.links.to[figure.links.x.indexOf(point.x)];
    if (to) location.assign(to);
  });
  if (!element.querySelector('.plot__twin').hidden) twin(element.querySelector('.plot__twin'), shown, { time: element.dataset.tTime });
}

/** Append points to the traces of a drawn chart and keep the last `keep`: update(el, [[x, y0, y1…]…], 720). */
export function update(element, rows, keep = 720) {
  const { figure } = element;
  if (!figure) return;
  for (const [x, ...ys] of rows) ys.forEach((y, i) => { const t = figure.data[i]; if (t) { t.x.push(x); t.y.push(y); } });
  for (const t of figure.data) if (t.x.length > keep) { t.x.splice(0, t.x.length - keep); t.y.splice(0, t.y.length - keep); }
  if (!document.hidden) draw(element, figure);
}

function toggle(element) {
  const button = element.querySelector('.plot__toggle');
  const table = element.querySelector('.plot__twin');
  const on = table.hidden;
  table.hidden = !on;
  element.querySelector('.plot__box').hidden = on;
  button.setAttribute('aria-pressed', String(on));
  button.textContent = on ? element.dataset.tChart : element.dataset.tTable;
  if (on && element.figure) twin(table, zoned(element.figure, document.documentElement.dataset.zone), { time: element.dataset.tTime });
}

async function load(element) {
  element.dataset.loading = '';
  try {
    const answer = await fetch(element.dataset.src, { headers: { Accept: 'application/json' }, credentials: 'same-origin' });
    if (!answer.ok) throw new Error(String(answer.status));
    await draw(element, await answer.json());
  } catch {
    if (!element.figure) {
      element.querySelector('.blank')?.remove();
      const note = document.createElement('p');
      note.className = 'blank'; note.textContent = element.dataset.tFailed;
      element.querySelector('.plot__box').append(note);
    }
  } finally { delete element.dataset.loading; }
}

/** Draw all charts below `scope` that are not drawn yet. */
export function start(scope = document) {
  for (const element of scope.querySelectorAll('[data-chart]:not([data-started])')) {
    element.dataset.started = '';
    element.querySelector('.plot__toggle').addEventListener('click', () => toggle(element));
    const data = element.querySelector('.plot__data');
    if (data) draw(element, JSON.parse(data.textContent));
    else if (element.dataset.src) {
      load(element);
      const every = Number(element.dataset.every);
      if (every) setInterval(() => { if (!document.hidden && element.isConnected) load(element); }, every * 1000);
    }
  }
}

const again = () => { for (const el of document.querySelectorAll('[data-chart]')) if (el.figure) draw(el, el.figure); };
document.addEventListener('themechange', again);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', again);
document.addEventListener('htmx:load', (event) => start(event.detail.elt.parentElement ?? document));
document.addEventListener('chart:reload', (event) => { const el = event.target.closest('[data-chart]'); if (el?.dataset.src) load(el); });
start();
