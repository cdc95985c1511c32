// Colours of the design tokens as the browser resolves them now (light-dark() included), kept until the theme changes.
const kept = new Map();
const probe = document.createElement('span');
probe.hidden = true;

/** The computed colour of a token such as "--ok-soft". */
export function token(name) {
  let value = kept.get(name);
  if (!value) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.setProperty('color', `var(${name})`);
    value = getComputedStyle(probe).color;
    kept.set(name, value);
  }
  return value;
}

/** Call `draw` whenever colours have changed. */
export function onTheme(draw) {
  const again = () => { kept.clear(); draw(); };
  document.addEventListener('themechange', again);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', again);
}
