// Tables that accountants work in: [data-grid]. Arrow keys walk the cells (Home, End, PageUp, PageDown too), Ctrl+C
// takes the cell with every digit, a button [data-act="copy-table"][data-target=id] the whole table as tab-separated text.

const cellsOf = (row) => [...row.cells];
const rowsOf = (table) => [...table.rows].filter((row) => !row.hidden);

const FIGURE = /^[\u2212-]?[\d,]+(\.\d+)?$/;
const plain = (figure) => figure.replaceAll(',', '').replace('\u2212', '-');

/** The figure of a cell with every digit (its title) where it is one, else its words; figures as spreadsheets read them. */
function text(cell) {
  const exact = cell.getAttribute('title') || cell.querySelector('[title]')?.getAttribute('title');
  if (exact && FIGURE.test(exact)) return plain(exact);
  const words = cell.cloneNode(true);
  for (const hidden of words.querySelectorAll('svg, .vh')) hidden.remove();
  for (const second of words.querySelectorAll('small')) second.before(' ');
  const shown = words.textContent.trim().replace(/\s+/g, ' ');
  return FIGURE.test(shown) ? plain(shown) : shown;
}

/** Formulas stay words in a spreadsheet, as in the files for people. */
const safe = (value) => (/^[=+@]/.test(value) || /^-(?![\d.])/.test(value) ? `'${value}` : value);

const asText = (table) => rowsOf(table).map((row) => cellsOf(row).map((c) => safe(text(c))).join('\t')).join('\n');

async function toClipboard(value, button) {
  try {
    await navigator.clipboard.writeText(value);
  } catch {
    const area = document.createElement('textarea');
    area.value = value; area.className = 'vh'; document.body.append(area); area.select();
    document.execCommand('copy'); area.remove(); button?.focus();
  }
}

function focusCell(table, cell) {
  for (const other of table.querySelectorAll('[tabindex="0"]')) if (other !== cell) other.tabIndex = -1;
  cell.tabIndex = 0;
  cell.focus();
}

function move(event, table) {
  const cell = event.target.closest('th, td');
  if (!cell || event.altKey || event.metaKey || event.ctrlKey) return;
  const rows = rowsOf(table), y = rows.indexOf(cell.parentElement), x = cellsOf(cell.parentElement).indexOf(cell);
  const steps = {
    ArrowRight: [y, x + 1], ArrowLeft: [y, x - 1], ArrowDown: [y + 1, x], ArrowUp: [y - 1, x],
    Home: [y, 0], End: [y, rows[y].cells.length - 1], PageDown: [Math.min(y + 10, rows.length - 1), x], PageUp: [Math.max(y - 10, 0), x],
  };
  if (event.key === 'Enter' && event.target === cell) { cell.querySelector('a, button')?.click(); return; }
  const [row, column] = steps[event.key] ?? [];
  const next = rows[row]?.cells[column];
  if (!next) return;
  event.preventDefault();
  focusCell(table, next);
}

for (const table of document.querySelectorAll('table[data-grid]')) {
  for (const cell of table.querySelectorAll('th, td')) cell.tabIndex = -1;
  const first = table.tBodies[0]?.rows[0]?.cells[0];
  if (first) first.tabIndex = 0;
  for (const inner of table.querySelectorAll('tbody a')) inner.tabIndex = -1; // reached by Enter on the cell, and by the mouse
  table.addEventListener('keydown', (event) => move(event, table));
  table.addEventListener('copy', (event) => {
    const cell = event.target.closest?.('th, td');
    if (!cell || String(getSelection())) return;
    event.preventDefault();
    event.clipboardData.setData('text/plain', safe(text(cell)));
  });
}

document.addEventListener('click', (event) => {
  const button = event.target.closest('[data-act="copy-table"]');
  const table = button && document.getElementById(button.dataset.target);
  if (!table) return;
  toClipboard(asText(table), button);
  const label = button.lastElementChild;
  const before = label.textContent;
  label.textContent = button.dataset.done;
  setTimeout(() => { label.textContent = before; }, 2000);
});
