// Behaviour that every page shares. Texts come from the page; this file has none.
import { toast } from './toasts.mjs';

const root = document.documentElement;

/** Set a cookie for this installation for a year (its path is the page's own prefix). */
function setCookie(name, value) {
  const secure = location.protocol === 'https:' ? '; Secure' : '';
  document.cookie = `${name}=${value}; Max-Age=31536000; Path=${root.dataset.cookiePath || '/'}; SameSite=Lax${secure}`;
}

/** The CSRF token of this page, for fetch calls. */
export function csrfToken() {
  const headers = document.body.getAttribute('hx-headers');
  if (headers) return JSON.parse(headers)['X-CSRFToken'];
  return document.querySelector('input[name=csrfmiddlewaretoken]')?.value ?? '';
}

function switchTheme() {
  const now = root.dataset.theme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  const next = now === 'dark' ? 'light' : 'dark';
  root.dataset.theme = next;
  setCookie(root.dataset.themeCookie, next);
  document.dispatchEvent(new CustomEvent('themechange', { detail: next }));
  if (root.dataset.themeUrl) {
    fetch(root.dataset.themeUrl, {
      method: 'POST', credentials: 'same-origin', headers: { 'X-CSRFToken': csrfToken() },
      body: new URLSearchParams({ theme: next }),
    }).catch(() => {});
  }
}

async function copy(button) {
  const text = button.dataset.copy ?? document.getElementById(button.dataset.target)?.textContent ?? '';
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without a secure context there is no clipboard: select a copy of the text and use the old command
    const area = document.createElement('textarea');
    area.value = text; area.className = 'vh'; document.body.append(area); area.select();
    document.execCommand('copy'); area.remove(); button.focus();
  }
  const label = button.getAttribute('aria-label');
  button.setAttribute('aria-label', button.dataset.done || label);
  button.dataset.copied = '';
  setTimeout(() => { button.setAttribute('aria-label', label); delete button.dataset.copied; }, 2000);
}

/** One of several views in the page; the choice goes into the URL so that Back and links work. */
function setView(group, value) {
  for (const n of document.querySelectorAll(`[data-view="${group}"]`)) n.hidden = n.dataset.value !== value;
  for (const n of document.querySelectorAll(`[data-act="view"][data-group="${group}"]`)) {
    const on = n.dataset.value === value;
    if (n.matches('a')) on ? n.setAttribute('aria-current', 'page') : n.removeAttribute('aria-current');
    else n.setAttribute('aria-pressed', String(on));
  }
  const url = new URL(location.href);
  url.searchParams.set(group, value);
  history.replaceState(history.state, '', url);
}

/** Open or close a row of a tree table with all that hangs below it. */
function twist(button) {
  const open = button.getAttribute('aria-expanded') !== 'true';
  button.setAttribute('aria-expanded', String(open));
  const show = (id, on) => {
    for (const row of document.querySelectorAll(`[data-parent="${id}"]`)) {
      row.hidden = !on;
      const own = row.querySelector('[data-act="twist"]');
      if (own) show(own.dataset.target, on && own.getAttribute('aria-expanded') === 'true');
    }
  };
  show(button.dataset.target, open);
}

const acts = {
  theme: switchTheme,
  copy,
  twist,
  dialog: (el) => document.getElementById(el.dataset.target)?.showModal(),
  close: (el) => el.closest('dialog')?.close(),
  dismiss: (el) => el.closest('.toast')?.remove(),
  print: () => window.print(),
  reload: () => location.reload(),
  back: () => history.back(),
  view: (el) => setView(el.dataset.group, el.dataset.value),
  wrap: (el) => {
    const on = el.getAttribute('aria-pressed') !== 'true';
    el.setAttribute('aria-pressed', String(on));
    el.closest('.log')?.toggleAttribute('data-wrap', on);
  },
  'check-all': (el) => {
    for (const box of document.querySelectorAll(`input[type=checkbox][name="${el.dataset.name}"]`)) {
      box.checked = el.checked;
      box.dispatchEvent(new Event('change', { bubbles: true }));
    }
  },
};

document.addEventListener('click', (event) => {
  const el = event.target.closest('[data-act]');
  if (!el || !acts[el.dataset.act]) return;
  if (el.matches('a')) event.preventDefault();
  acts[el.dataset.act](el);
});

// A click on the backdrop closes a dialog; a menu closes when the click is elsewhere
document.addEventListener('click', (event) => {
  if (event.target instanceof HTMLDialogElement && event.target.open) {
    const r = event.target.getBoundingClientRect();
    const outside = event.clientX < r.left || event.clientX > r.right || event.clientY < r.top || event.clientY > r.bottom;
    if (outside && event.detail) event.target.close();
  }
  for (const menu of document.querySelectorAll('details.menu[open]')) {
    if (!menu.contains(event.target)) menu.open = false;
  }
});
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape') return;
  const menu = document.activeElement?.closest('details.menu[open]');
  if (menu) { menu.open = false; menu.querySelector('summary').focus(); }
});

// Filters send themselves on change and after typing; empty fields stay out of the URL
function sendFilters(form) {
  const data = new FormData(form);
  const query = new URLSearchParams();
  for (const [key, value] of data) if (value !== '') query.append(key, value);
  const action = form.getAttribute('action') || location.pathname;
  location.assign(query.size ? `${action}?${query}` : action);
}
document.addEventListener('submit', (event) => {
  const form = event.target;
  if (form.matches('form[data-autosubmit]') && !form.hasAttribute('hx-get')) { event.preventDefault(); sendFilters(form); }
  else if (form.method === 'post' && !form.hasAttribute('hx-post')) {
    // A second click must not send twice; the button's own name and value still go out
    if (event.defaultPrevented) return;
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = '1';
    setTimeout(() => { delete form.dataset.sent; }, 5000); // an answer that is a download leaves the page standing
  }
});
document.addEventListener('change', (event) => {
  const form = event.target.form;
  if (form?.matches('form[data-autosubmit]') && event.target.matches('select, input[type=checkbox], input[type=radio], input[type=date], input[type=month]')) form.requestSubmit();
});
window.addEventListener('pageshow', () => {
  for (const form of document.querySelectorAll('form[data-sent]')) delete form.dataset.sent;
});

// A slider and its figure are one value
document.addEventListener('input', (event) => {
  const el = event.target;
  if (el.dataset?.slide) {
    const number = document.getElementById(el.dataset.slide);
    if (number && number.value !== el.value) { number.value = el.value; number.dispatchEvent(new Event('input', { bubbles: true })); }
  }
  if (el.id) {
    const range = document.querySelector(`[data-slide="${CSS.escape(el.id)}"]`);
    if (range) range.value = el.value;
  }
});

// "2 h 47 min left" is the server's wording; when the moment has passed the page asks for the new state
function watchEnds() {
  for (const el of document.querySelectorAll('[data-until]')) {
    const left = new Date(el.dataset.until) - Date.now();
    el.toggleAttribute('data-over', left <= 0);
  }
}
setInterval(() => { if (!document.hidden) watchEnds(); }, 30000);

// A fragment that fails says so once and leaves what stood there
let signedOut = false;
document.addEventListener('htmx:responseError', (event) => {
  const { status } = event.detail.xhr;
  if (status === 403) return;
  if (status !== 401) toast('toast-failed');
  else if (!signedOut) { signedOut = true; toast('toast-signed-out'); }
});
document.addEventListener('htmx:sendError', () => toast('toast-failed'));
// Forms answered with 4xx come back with their errors beside the fields
document.addEventListener('htmx:beforeSwap', (event) => {
  const { xhr } = event.detail;
  const html = (xhr.getResponseHeader('Content-Type') || '').startsWith('text/html');
  if ([400, 409, 422].includes(xhr.status) && html) { event.detail.shouldSwap = true; event.detail.isError = false; }
});
// A hidden tab does not poll
document.addEventListener('htmx:beforeRequest', (event) => {
  if (document.hidden && event.detail.requestConfig?.triggeringEvent?.type === undefined && event.detail.elt.getAttribute('hx-trigger')?.includes('every')) event.preventDefault();
});

// The maintenance page looks again by itself and goes on when the installation is ready
const waiting = document.querySelector('[data-wait-ready]');
if (waiting) {
  setInterval(async () => {
    const answer = await fetch(waiting.dataset.waitReady, { cache: 'no-store' }).catch(() => null);
    if (answer?.ok) location.assign(location.href);
  }, 15000);
}

function start(scope = document) {
  for (const dialog of scope.querySelectorAll('dialog[data-open-now]')) if (!dialog.open) dialog.showModal();
  for (const item of scope.querySelectorAll('.toast[data-fade]')) setTimeout(() => item.remove(), 8000);
}
start();
document.addEventListener('htmx:load', (event) => start(event.detail.elt.parentElement ?? document));

// Parts that need a script of their own name it: <div data-module="wall"> loads ./wall.mjs and calls its start(element)
function startModules(scope) {
  for (const el of [scope, ...scope.querySelectorAll('[data-module]')]) {
    if (!el.dataset?.module || 'moduleStarted' in el.dataset || !/^[a-z-]+$/.test(el.dataset.module)) continue;
    el.dataset.moduleStarted = '';
    import(`./${el.dataset.module}.mjs`).then((m) => m.start(el));
  }
}
startModules(document.documentElement);
document.addEventListener('htmx:load', (event) => startModules(event.detail.elt));
