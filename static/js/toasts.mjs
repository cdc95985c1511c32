// Toasts: the result of an act. The words are in <template> elements of the page.

/** Show the toast of a template; `text` replaces its words, `seconds` 0 keeps it until it is closed. */
export function toast(templateId, { text, seconds = 8 } = {}) {
  const box = document.getElementById('toasts');
  const template = document.getElementById(templateId);
  if (!box || !template) return null;
  if (box.querySelector(`[data-from="${templateId}"]`)) return null;
  const item = template.content.firstElementChild.cloneNode(true);
  item.dataset.from = templateId;
  if (text) item.querySelector('[data-text]').textContent = text;
  box.append(item);
  if (seconds) setTimeout(() => item.remove(), seconds * 1000);
  return item;
}
