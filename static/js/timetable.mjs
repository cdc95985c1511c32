// A weekly timetable drawn from the JSON in a textarea, and written back to it: painted by pointer or keyboard.
const HOURS = 24;

export function drawTimetables(root) {
  for (const box of root.querySelectorAll('[data-timetable]:not([data-drawn])')) draw(box);
}

function draw(box) {
  const text = box.querySelector('textarea');
  let days;
  try { days = JSON.parse(text.value); } catch { return; }
  if (!Array.isArray(days) || days.length !== 7 || days.some((day) => !Array.isArray(day) || day.length !== HOURS)) return;
  const names = box.dataset.days.split(',');
  const most = box.closest('form').elements.replicas;

  const bar = element('div', { className: 'row spread f13' });
  const label = element('label', { className: 'f12 muted', htmlFor: 'brush', textContent: `${box.dataset.brush} ` });
  const brush = element('input', { id: 'brush', className: 'input', type: 'number', min: '0', max: '256', value: String(Math.max(...days.flat())) });
  brush.style.inlineSize = '5rem';
  label.append(brush);
  const copy = element('button', { className: 'btn', type: 'button', textContent: box.dataset.copy });
  copy.dataset.size = 's';
  bar.append(label, copy);

  const wrap = element('div', { className: 'table-wrap' });
  const table = element('table', { className: 'week' });
  table.append(element('caption', { className: 'vh', textContent: box.dataset.caption }));
  const head = element('tr');
  head.append(element('td'));
  for (let hour = 0; hour < HOURS; hour += 1) {
    const cell = element('th', { scope: 'col' });
    cell.append(hour % 3 ? element('span', { className: 'vh', textContent: String(hour) }) : String(hour));
    head.append(cell);
  }
  const top = element('thead');
  top.append(head);
  const body = element('tbody');
  const cells = days.map((row, day) => {
    const line = element('tr');
    line.append(element('th', { scope: 'row', textContent: names[day] }));
    const found = row.map((_value, hour) => {
      const cell = element('td', { tabIndex: day + hour ? -1 : 0 });
      line.append(cell);
      return cell;
    });
    body.append(line);
    return found;
  });
  table.append(top, body);
  wrap.append(table);
  const help = element('p', { className: 'help', textContent: box.dataset.help });
  box.prepend(bar, wrap, help);
  box.dataset.drawn = '';

  function show(day, hour) {
    const value = days[day][hour];
    const peak = Math.max(1, ...days.flat());
    const cell = cells[day][hour];
    cell.textContent = String(value);
    cell.dataset.h = String(Math.ceil((4 * value) / peak));
    cell.setAttribute('aria-label', `${names[day]} ${hour}:00 – ${value}`);
  }
  function showAll() {
    for (let day = 0; day < 7; day += 1) for (let hour = 0; hour < HOURS; hour += 1) show(day, hour);
    text.value = JSON.stringify(days);
    if (most) most.value = String(Math.max(...days.flat()));
  }
  function write() {
    showAll();
    text.dispatchEvent(new Event('change', { bubbles: true }));
  }
  function set(day, hour, value) {
    days[day][hour] = Math.max(0, Math.min(256, value));
    showAll();
  }
  function at(target) {
    for (let day = 0; day < 7; day += 1) {
      const hour = cells[day].indexOf(target);
      if (hour >= 0) return [day, hour];
    }
    return null;
  }

  let painting = false;
  table.addEventListener('pointerdown', (event) => {
    const place = at(event.target);
    if (!place) return;
    painting = true;
    set(...place, Number(brush.value) || 0);
  });
  table.addEventListener('pointerover', (event) => {
    const place = painting && at(event.target);
    if (place) set(...place, Number(brush.value) || 0);
  });
  document.addEventListener('pointerup', () => {
    if (painting) write();
    painting = false;
  });
  table.addEventListener('keydown', (event) => {
    const place = at(event.target);
    if (!place) return;
    const [day, hour] = place;
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (step) {
      const next = cells[day + step[0]]?.[hour + step[1]];
      if (next) {
        event.target.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
      }
    } else if (/^\d$/.test(event.key)) {
      set(day, hour, Number(event.key));
      write();
    } else if (event.key === ' ' || event.key === 'Enter') {
      set(day, hour, Number(brush.value) || 0);
      write();
    } else return;
    event.preventDefault();
  });
  copy.addEventListener('click', () => {
    for (let day = 1; day < 5; day += 1) days[day] = [...days[0]];
    write();
  });
  showAll();
}

function element(name, properties = {}) {
  return Object.assign(document.createElement(name), properties);
}
