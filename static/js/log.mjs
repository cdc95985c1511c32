// A streaming log stays at its end while its reader is there, and where the reader scrolled to otherwise.
const NEAR = 24; // px from the end that still count as "at the end"
let stuck = true;
let kept = 0;

const body = () => document.querySelector('#log .log__body');
const place = () => {
  const box = body();
  if (!box) return;
  box.scrollTop = stuck ? box.scrollHeight : kept;
};

document.addEventListener('scroll', (event) => {
  const box = event.target;
  if (!(box instanceof Element) || !box.matches('#log .log__body')) return;
  kept = box.scrollTop;
  stuck = box.scrollHeight - box.clientHeight - box.scrollTop < NEAR;
}, true);
document.addEventListener('htmx:afterSwap', place);
place();
