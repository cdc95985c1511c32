// The request form: asks the panel again after typing, and takes over what the panel proposes.
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
  const field = form.elements[button.dataset.setName];
  if (!field) return;
  field.value = button.dataset.setValue;
  refit();
  if (field.focus) field.focus({ preventScroll: true });
});
