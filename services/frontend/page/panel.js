// The live panel: what the engine does, asked for once a second while somebody can see it.

import { KeyMissing, call } from './api.js';
import { byId, make } from './dom.js';

const EVERY_MS = 1000;
const TIMEOUT_MS = 5000;
const RATE_OVER_MS = 3000; // counters come every half second: a shorter window would jump
const HISTORY = 60;

function percent(part, whole) {
  if (!whole) return '–';
  const rounded = Math.round((100 * part) / whole);
  return part && !rounded ? '< 1 %' : `${rounded} %`;
}

export class Panel {
  /** `onState(state, status)`: state is 'ready', 'starting', 'lost' or 'key'. */
  constructor(onState) {
    this.onState = onState;
    this.element = byId('engine');
    this.state = '';
    this.samples = [];
    this.rates = [];
    this.rows = new Map();
    this.timer = 0;
    this.asking = false;
    document.addEventListener('visibilitychange', () => this.wake());
    document.addEventListener('keychange', () => {
      this.state = '';
      this.wake();
    });
  }

  /** Poll while the panel is seen; while the server is away also without, to notice its return. */
  get wanted() {
    if (document.hidden || this.state === 'key') return false; // a new key wakes it
    return !this.element.hidden || this.state !== 'ready';
  }

  /** Ask now and go on while it is wanted. */
  wake() {
    clearTimeout(this.timer);
    if (this.wanted && !this.asking) this.poll();
  }

  async poll() {
    this.asking = true;
    try {
      const response = await call('playground/status', { signal: AbortSignal.timeout(TIMEOUT_MS) }, false);
      const status = await response.json();
      this.show(status);
      this.enter(status.ready ? 'ready' : 'starting', status);
    } catch (error) {
      this.enter(error instanceof KeyMissing ? 'key' : 'lost', null);
    }
    this.asking = false;
    clearTimeout(this.timer);
    if (this.wanted) this.timer = setTimeout(() => this.wake(), EVERY_MS);
  }

  enter(state, status) {
    this.state = state;
    if (state === 'lost') {
      this.samples = [];
      byId('processes').dataset.flows = 'no';
    }
    this.element.dataset.state = state;
    byId('freshness').textContent = {
      lost: 'The server does not answer; these are the last values.',
      key: 'An API key is needed to see this.',
    }[state] ?? '';
    this.onState(state, status);
  }

  show(status) {
    const rate = this.rate(status.generation_tokens);
    const put = (id, text) => { byId(id).textContent = text; };
    put('rate', rate < 10 && rate > 0 ? rate.toFixed(1) : Math.round(rate).toLocaleString('en'));
    put('running', status.running);
    put('waiting', status.waiting);
    put('kv', percent(status.kv_blocks_used, status.kv_blocks_total));
    byId('kv').title = `${status.kv_blocks_used} of ${status.kv_blocks_total} blocks`;
    byId('kv-bar').value = status.kv_blocks_used / (status.kv_blocks_total || 1);
    put('cache', percent(status.prefix_cache_hit_tokens, status.prefix_cache_query_tokens));
    byId('cache-bar').value = status.prefix_cache_hit_tokens / (status.prefix_cache_query_tokens || 1);
    this.draw(rate);
    this.list(status.processes);
    byId('processes').dataset.flows = status.running > 0 ? 'yes' : 'no';
  }

  /** Tokens per second over the last moments. A counter that fell belongs to another server. */
  rate(tokens) {
    const now = performance.now();
    if (this.samples.length && tokens < this.samples.at(-1).tokens) this.samples = [];
    this.samples.push({ now, tokens });
    while (this.samples.length > 2 && now - this.samples[1].now >= RATE_OVER_MS) this.samples.shift();
    const first = this.samples[0];
    return now > first.now ? ((tokens - first.tokens) * 1000) / (now - first.now) : 0;
  }

  draw(rate) {
    this.rates.push(rate);
    if (this.rates.length > HISTORY) this.rates.shift();
    const top = Math.max(...this.rates, 1);
    const first = HISTORY - this.rates.length;
    const points = this.rates.map((one, i) => `${first + i},${(19 - (18 * one) / top).toFixed(2)}`);
    const [area, line] = byId('spark').children;
    line.setAttribute('points', points.join(' '));
    area.setAttribute('points', [`${first},20`, ...points, `${HISTORY - 1},20`].join(' '));
  }

  list(processes) {
    const seen = new Set();
    const list = byId('processes');
    for (const [index, one] of processes.entries()) {
      const id = `${one.host}/${one.pid}`;
      seen.add(id);
      const row = this.rows.get(id) ?? this.row(id);
      row.node.dataset.phase = one.phase;
      row.node.dataset.service = one.service;
      row.name.textContent = this.named(one, processes);
      row.node.title = `${one.service}, pid ${one.pid} on ${one.host}`;
      row.phase.textContent = `${[one.phase, one.note].filter(Boolean).join(': ')} · pid ${one.pid}`;
      row.load.textContent = one.load ? `${one.load} open` : '';
      if (list.children[index] !== row.node) list.insertBefore(row.node, list.children[index] ?? null);
    }
    for (const [id, row] of this.rows) {
      if (!seen.has(id)) {
        row.node.remove();
        this.rows.delete(id);
      }
    }
  }

  /** The service, with its place where there are several of it. */
  named(one, processes) {
    const alike = processes.filter((other) => other.service === one.service);
    if (alike.length === 1 || !one.engine) return one.service;
    const ranks = alike.some((other) => other.rank !== 0);
    return `${one.service} ${one.engine}${ranks ? `.${one.rank}` : ''}`;
  }

  row(id) {
    const row = {
      name: make('strong'),
      load: make('span', { className: 'load' }),
      phase: make('span', { className: 'phase' }),
    };
    row.node = make('li', {}, make('span', { className: 'dot' }), row.name, row.load, row.phase);
    this.rows.set(id, row);
    return row;
  }
}
