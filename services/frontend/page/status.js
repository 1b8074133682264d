// Asks the server how it is: once a second while somebody looks at it or waits for it, else seldom.

import { KeyMissing, call } from './api.js';

const SOON_MS = 1000;
const SELDOM_MS = 5000;
const TIMEOUT_MS = 5000;

export class StatusPoller {
  /**
   * `onState(state, status)`: 'ready', 'starting', 'draining', 'lost' or 'key'; `status` is the
   * server's answer where there is one. `watched()`: whether somebody looks at the figures.
   */
  constructor({ onState, watched }) {
    this.onState = onState;
    this.watched = watched;
    this.state = '';
    this.timer = 0;
    this.asking = false;
    document.addEventListener('visibilitychange', () => this.wake());
    document.addEventListener('keychange', () => {
      this.state = '';
      this.wake();
    });
  }

  /** Not in a hidden tab; without a key not until there is a new one. */
  get wanted() { return !document.hidden && this.state !== 'key'; }

  get pause() { return this.watched() || this.state !== 'ready' ? SOON_MS : SELDOM_MS; }

  /** Ask now and go on while it is wanted. */
  wake() {
    clearTimeout(this.timer);
    if (this.wanted && !this.asking) this.poll();
  }

  /** A request has found that the server is away. */
  lost() {
    this.state = 'lost';
    this.wake();
  }

  async poll() {
    this.asking = true;
    try {
      const response = await call('playground/status', { signal: AbortSignal.timeout(TIMEOUT_MS) }, false);
      const status = await response.json();
      this.enter(stateOf(status), status);
    } catch (error) {
      this.enter(error instanceof KeyMissing ? 'key' : 'lost', null);
    }
    this.asking = false;
    clearTimeout(this.timer);
    if (this.wanted) this.timer = setTimeout(() => this.wake(), this.pause);
  }

  enter(state, status) {
    // A server that goes down closes its port before its last answers are written.
    this.state = state === 'lost' && this.state === 'draining' ? 'draining' : state;
    this.onState(this.state, status);
  }
}

function stateOf({ ready, draining }) {
  if (draining) return 'draining';
  return ready ? 'ready' : 'starting';
}
