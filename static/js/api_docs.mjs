// The API page: Swagger UI over our own schema. Writes by session carry the CSRF token.
const place = document.getElementById('swagger-ui');
const root = document.documentElement;
const dark = matchMedia('(prefers-color-scheme: dark)');

/** Swagger UI has a dark look of its own, switched by a class on the root element. */
function follow() {
  const chosen = root.dataset.theme;
  root.classList.toggle('dark-mode', chosen ? chosen === 'dark' : dark.matches);
}
follow();
dark.addEventListener('change', follow);
document.addEventListener('themechange', follow);

window.SwaggerUIBundle({
  url: place.dataset.schema,
  domNode: place,
  presets: [window.SwaggerUIBundle.presets.apis],
  layout: 'BaseLayout',
  deepLinking: true,
  docExpansion: 'none',
  defaultModelsExpandDepth: -1,
  validatorUrl: null,
  requestInterceptor: (request) => {
    if (!['GET', 'HEAD'].includes(request.method ?? 'GET')) request.headers['X-CSRFToken'] = place.dataset.csrf;
    return request;
  },
});

/** Its heads skip a level of the page's outline; its own main landmark is the page's, and leaves out its title. */
function outline() {
  const info = place.querySelector('.information-container:not([role])');
  if (info) {
    info.setAttribute('role', 'region');
    info.setAttribute('aria-label', 'OpenAPI');
  }
  for (const el of place.querySelectorAll('.opblock-tag:not([aria-level])')) {
    el.setAttribute('role', 'heading');
    el.setAttribute('aria-level', '2');
  }
}
new MutationObserver(outline).observe(place, { childList: true, subtree: true });
