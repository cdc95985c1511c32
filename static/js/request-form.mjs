// The request form: asks the panel again after typing, takes over what the panel proposes, draws the timetable.
import { drawTimetables } from './timetable.mjs';

const form = document.querySelector('[data-request-form]');
const panel = document.getElementById('fit');

let timer;
function refit() {
  clearTimeout(timer);
  timer = setTimeout(() => panel.dispatchEvent(new CustomEvent('refit')), 350);
}
form.addEventListener('input', (event) => { if (!event.target.matches('textarea')) refit(); });
form.addEventListener('change', refit);

panel.addEventListener('click', (event) => {
  const button = event.target.closest('[data-set]');
  if (!button) return;
  let last;
  for (const [name, value] of Object.entries(JSON.parse(button.dataset.set))) {
    const field = form.elements[name];
    if (!field) continue;
    field.value = String(value);
    last = field;
  }
  refit();
  if (last?.focus) last.focus({ preventScroll: true });
});

drawTimetables(form);
