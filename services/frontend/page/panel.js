// The live panel: what the model is, and what the engine does.

import { byId, make } from './dom.js';

const RATE_OVER_MS = 3000; // counters come every half second: a shorter window would jump
const HISTORY = 60;

function percent(part, whole) {
  if (!whole) return '–';
  const rounded = Math.round((100 * part) / whole);
  return part && !rounded ? '< 1 %' : `${rounded} %`;
}

/** The names of what a status tells of the model: `[[label, text], …]`. */
export function modelFacts({ models, devices, dtypes }) {
  const context = [...new Set(models.map((model) => model.max_model_len))];
  return [
    ['Context', context.map((tokens) => `${tokens.toLocaleString('en')} tokens`).join(', ')],
    ['Dtype', dtypes.join(', ')],
    ['Device', devices.join(', ')],
  ].filter(([, text]) => text);
}

export class Panel {
  constructor() {
    this.element = byId('engine');
    this.samples = [];
    this.rates = [];
    this.rows = new Map();
  }

  get isSeen() { return !this.element.hidden; }

  /** `status` is null where the server did not answer. */
  enter(state, status) {
    if (status) {
      this.show(status);
    } else {
      this.samples = [];
      byId('processes').dataset.flows = 'no';
    }
    this.element.dataset.state = status ? state : 'lost';
    const hint = { lost: 'The server does not answer; these are the last values.', key: 'An API key is needed to see this.' };
    byId('freshness').textContent = status ? '' : hint[state] ?? hint.lost;
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
    this.facts(status);
    this.list(status.processes);
    byId('processes').dataset.flows = status.running > 0 ? 'yes' : 'no';
  }

  facts(status) {
    const facts = [['Model', status.models.map((model) => model.name).join(', ')], ...modelFacts(status), ['Version', `Penstock ${status.version}`]];
    const text = JSON.stringify(facts);
    if (text === this.shownFacts) return;
    this.shownFacts = text;
    byId('facts').replaceChildren(...facts.map(([label, value]) => (
      make('div', {}, make('dt', {}, label), make('dd', {}, value || '–')))));
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
