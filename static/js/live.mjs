// A live feed over one WebSocket: a snapshot, then numbered deltas. A gap, silence or a lost connection is said and mended.
//
// JSON messages: {"t": "snapshot"|"delta"|"beat"|"bye", "n": number, "at": ISO time, …}. Binary frames: a header of 24 bytes, little
// endian, then the payload: u8 version (1), u8 kind (0 snapshot, 1 delta, 2 beat), u16 reserved, u32 reserved, u64 number,
// f64 time (ms since 1970). A feed with another layout passes its own `decode(ArrayBuffer) → {t, n, at, …}`.
//
// Texts of the indicator come from its data-t-* attributes (see the `live` tag).

const SILENCE_MS = 15000;
const BACKOFF_MS = [500, 1000, 2000, 4000, 8000, 15000, 30000];
const HIDDEN_CLOSE_MS = 60000;

/** The address of a socket from a page path; keeps the path prefix, follows http or https. */
export function socketUrl(path) {
  const url = new URL(path, location.href);
  url.protocol = url.protocol === 'https:' ? 'wss:' : 'ws:';
  return url.href;
}

/** The head of a binary frame and its payload. */
export function decodeFrame(buffer) {
  const view = new DataView(buffer);
  const kind = ['snapshot', 'delta', 'beat'][view.getUint8(1)];
  return { t: kind, n: Number(view.getBigUint64(8, true)), at: view.getFloat64(16, true), payload: new DataView(buffer, 24) };
}

let clock = null; // to make a formatter costs more than all else that a message does here
const clockText = (ms) => (clock ??= new Intl.DateTimeFormat('en-GB', { timeStyle: 'medium', hour12: false, timeZone: document.documentElement.dataset.zone || undefined })).format(ms);

/**
 * Open a feed. Options: `indicator` (element of the `live` tag), `onSnapshot(message)`, `onDelta(message)`, `onMessage(message)` for other
 * kinds, `onState(state, details)` with state wait | live | paused | stale | off, `staleMs` (age of data after which it is stale),
 * `decode` for binary frames, `hello()` → a message to send on opening.
 * Returns { pause(), resume(), toggle(), send(message), close(), state }.
 */
export function connect(path, options = {}) {
  const { indicator, onSnapshot, onDelta, onMessage, onState, staleMs = 20000, decode = decodeFrame, hello } = options;
  let socket = null, state = 'wait', number = null, lastAt = 0, lastHeard = 0, tries = 0, retryAt = 0, timer = 0, hiddenTimer = 0;
  let paused = false, closed = false, resting = false;

  function show(next) {
    const details = { at: lastAt, left: Math.max(0, Math.ceil((retryAt - Date.now()) / 1000)) };
    const age = lastAt ? Math.round((Date.now() - lastAt) / 1000) : 0;
    if (indicator) {
      const text = (indicator.dataset[{ live: 'tLive', paused: 'tPaused', stale: 'tStale', off: 'tOff', wait: 'tWait' }[next]] || '')
        .replace('{time}', lastAt ? clockText(lastAt) : '–').replace('{age}', age).replace('{left}', details.left);
      if (indicator.textContent !== text) indicator.textContent = text;
      if (next === 'live') { if (indicator.dataset.s) delete indicator.dataset.s; } else if (indicator.dataset.s !== next) indicator.dataset.s = next;
      // Only a change of state is worth announcing; the ticking clock is not
      const told = next === state ? 'off' : 'polite';
      if (indicator.getAttribute('aria-live') !== told) indicator.setAttribute('aria-live', told);
    }
    if (next !== state) { state = next; onState?.(next, details); }
  }

  function take(message) {
    lastHeard = Date.now();
    if (message.at) lastAt = typeof message.at === 'number' ? message.at : Date.parse(message.at);
    if (message.t === 'snapshot') {
      number = message.n ?? null;
      tries = 0;
      if (!paused) onSnapshot?.(message);
    } else if (message.t === 'delta') {
      if (number === null) return;
      if (message.n !== number + 1) {
        if (message.n <= number) return; // seen already
        number = null;
        send({ t: 'resync' });
        return;
      }
      number = message.n;
      if (!paused) onDelta?.(message);
    } else if (message.t !== 'beat') {
      onMessage?.(message);
    }
    if (!paused) show(Date.now() - lastAt > staleMs && lastAt ? 'stale' : 'live');
  }

  function open() {
    if (closed || socket) return;
    resting = false;
    show('wait');
    socket = new WebSocket(socketUrl(path));
    socket.binaryType = 'arraybuffer';
    lastHeard = Date.now();
    socket.onopen = () => { if (hello) send(hello()); };
    socket.onmessage = (event) => take(typeof event.data === 'string' ? JSON.parse(event.data) : decode(event.data));
    socket.onclose = (event) => {
      socket = null; number = null;
      if (closed || resting) return;
      if (event.code === 4401 || event.code === 4403) { closed = true; retryAt = Date.now(); show('off'); return; }
      const wait = BACKOFF_MS[Math.min(tries, BACKOFF_MS.length - 1)] * (0.5 + Math.random());
      tries += 1;
      retryAt = Date.now() + wait;
      setTimeout(open, wait);
      tick();
    };
  }

  function send(message) { if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message)); }

  function tick() {
    if (closed) return;
    if (paused) show('paused');
    else if (!socket) show(resting ? 'paused' : 'off');
    else if (socket.readyState === WebSocket.OPEN) {
      if (Date.now() - lastHeard > SILENCE_MS) { socket.close(); return; }
      if (lastAt) show(Date.now() - lastAt > staleMs ? 'stale' : 'live');
    }
  }

  // A hidden tab rests: its feed is closed after a minute and starts again with a snapshot
  function visibility() {
    clearTimeout(hiddenTimer);
    if (document.hidden) {
      hiddenTimer = setTimeout(() => { resting = true; socket?.close(); }, HIDDEN_CLOSE_MS);
    } else if (!socket && !closed) { tries = 0; open(); }
  }

  document.addEventListener('visibilitychange', visibility);
  window.addEventListener('online', () => { if (!socket) open(); });
  timer = setInterval(tick, 1000);
  open();

  return {
    get state() { return state; },
    send,
    pause() { paused = true; show('paused'); },
    // After a pause the picture may have holes: a new snapshot fills them
    resume() { paused = false; number = null; if (socket) send({ t: 'resync' }); else open(); },
    toggle() { if (paused) this.resume(); else this.pause(); return paused; },
    close() { closed = true; clearInterval(timer); document.removeEventListener('visibilitychange', visibility); socket?.close(); },
  };
}

/** Tie a pause button (aria-pressed, data-t-pause, data-t-resume) to a feed. */
export function pauseButton(button, feed) {
  button.addEventListener('click', () => {
    const paused = feed.toggle();
    button.setAttribute('aria-pressed', String(paused));
    const label = paused ? button.dataset.tResume : button.dataset.tPause;
    if (label) button.lastChild.textContent = label;
  });
}
