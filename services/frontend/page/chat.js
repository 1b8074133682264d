// The conversation: questions, answers as they stream in, and what can be done with them.

import { ConnectionLost, KeyMissing, complete } from './api.js';
import { announce, byId, copy, make } from './dom.js';
import { TextView, withoutThinking } from './render.js';

const SILENT_MS = 15_000; // the server sends a comment every 10 s while a stream waits
const MEASURABLE_MS = 20; // pieces that arrive within less were read at once

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

/** A question and its answer. */
class Turn {
  constructor(question, chat) {
    this.question = question;
    this.chat = chat;
    this.body = make('div', { className: 'text' });
    this.notice = make('div', { className: 'notice', hidden: true });
    this.stats = make('p', { className: 'stats' });
    this.copy = make('button', { type: 'button', className: 'quiet small' }, 'Copy');
    this.copy.addEventListener('click', () => copy(this.text, this.copy));
    this.again = make('button', { type: 'button', className: 'quiet small' }, 'Regenerate');
    this.again.addEventListener('click', () => chat.answer(this));
    this.foot = make('div', { className: 'foot', hidden: true }, this.stats, this.copy, this.again);
    this.article = make('article', { className: 'answer', 'aria-label': 'Answer' },
      this.body, this.notice, this.foot);
    this.nodes = [
      make('article', { className: 'question', 'aria-label': 'Question' }, make('p', {}, question)),
      this.article,
    ];
    this.begin();
  }

  begin() {
    this.text = '';
    this.tokens = 0;
    this.firstAt = 0;
    this.lastAt = 0;
    this.tokensAtFirst = 0;
    this.began = this.heardAt = performance.now();
    this.body.replaceChildren();
    this.view = new TextView(this.body);
    this.hideNotice();
    this.foot.hidden = true;
    this.article.setAttribute('aria-busy', 'true');
    this.article.dataset.state = 'waiting';
  }

  add(text) {
    this.lastAt = performance.now();
    if (!this.firstAt) {
      this.firstAt = this.lastAt;
      this.article.dataset.state = 'streaming';
    }
    this.text += text;
  }

  count(tokens) {
    if (this.firstAt && !this.tokensAtFirst) this.tokensAtFirst = tokens;
    if (tokens > this.tokens) this.lastAt = performance.now();
    this.tokens = tokens;
  }

  /** Tokens per second after the first piece; from the question on where all came in one. */
  rate() {
    const after = this.tokens - this.tokensAtFirst;
    const span = this.lastAt - this.firstAt;
    if (after > 0 && span >= MEASURABLE_MS) return (after * 1000) / span;
    const ended = this.article.dataset.state === 'ended';
    return ended && this.firstAt ? (this.tokens * 1000) / (this.lastAt - this.began) : 0;
  }

  /** Put what has arrived on the page. */
  paint() {
    this.view.show(this.text);
    const parts = [];
    if (this.tokens) parts.push(`${this.tokens} token${this.tokens > 1 ? 's' : ''}`);
    if (this.firstAt) parts.push(`first after ${seconds(this.firstAt - this.began)}`);
    const rate = this.rate();
    if (rate) parts.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`);
    this.stats.textContent = parts.join(' · ');
    this.foot.hidden = !parts.length;
  }

  end(note) {
    this.article.dataset.state = 'ended';
    this.article.setAttribute('aria-busy', 'false');
    this.paint();
    if (note) this.stats.textContent = [this.stats.textContent, note].filter(Boolean).join(' · ');
    this.foot.hidden = false;
    this.copy.hidden = !this.text;
    this.again.hidden = false;
  }

  /** A message below the text, with a button to try again where `retry`. */
  say(message, retry) {
    this.notice.replaceChildren(make('p', {}, message));
    if (retry) {
      const button = make('button', { type: 'button', className: 'retry' }, 'Try again');
      button.addEventListener('click', () => this.chat.answer(this));
      this.notice.append(button);
      this.again.hidden = true; // it does the same
    }
    this.notice.dataset.kind = retry ? 'error' : 'wait';
    this.notice.hidden = false;
  }

  hideNotice() {
    this.notice.hidden = true;
  }
}

export class Chat {
  /**
   * `request()` gives the parameters of the next request and the system prompt, or null where a
   * setting is wrong; `onBusy(busy)` and `onLost()` are called as their names say.
   */
  constructor({ request, onBusy, onLost }) {
    this.request = request;
    this.onBusy = onBusy;
    this.onLost = onLost;
    this.turns = [];
    this.log = byId('log');
    this.stopper = null;
    this.follows = true;
    this.log.addEventListener('scroll', () => {
      const { scrollHeight, scrollTop, clientHeight } = this.log;
      this.follows = scrollHeight - scrollTop - clientHeight < 48;
    }, { passive: true });
  }

  get busy() {
    return this.stopper !== null;
  }

  /** Ask. False where nothing was sent. */
  ask(question) {
    if (this.busy || !question.trim()) return false;
    const turn = new Turn(question, this);
    if (!this.answer(turn)) return false;
    return true;
  }

  clear() {
    this.stop();
    this.turns = [];
    this.log.replaceChildren(byId('welcome') ?? this.welcome);
  }

  stop() {
    this.stopper?.abort();
  }

  /** What the model is sent: answers without their thinking; failed questions are left out. */
  messages(turn, system) {
    const messages = system ? [{ role: 'system', content: system }] : [];
    for (const one of this.turns) {
      if (one === turn) break;
      if (!one.text) continue;
      messages.push({ role: 'user', content: one.question });
      messages.push({ role: 'assistant', content: withoutThinking(one.text) });
    }
    messages.push({ role: 'user', content: turn.question });
    return messages;
  }

  /** Answer a new turn, or the last one anew. Returns false where a setting is wrong. */
  answer(turn) {
    const request = this.busy ? null : this.request();
    if (!request) return false;
    if (!this.turns.includes(turn)) {
      this.welcome = byId('welcome') ?? this.welcome;
      this.welcome.remove();
      if (this.turns.length) this.turns.at(-1).again.hidden = true;
      for (const one of this.turns) one.notice.querySelector('button')?.remove();
      this.turns.push(turn);
      this.log.append(...turn.nodes);
    }
    turn.begin();
    this.follows = true;
    this.scroll();
    const body = { messages: this.messages(turn, request.system), ...request.parameters };
    this.run(turn, body);
    return true;
  }

  async run(turn, body) {
    const stopper = new AbortController();
    this.stopper = stopper;
    this.onBusy(true);
    announce('The answer begins.');
    let planned = 0;
    const paint = () => {
      planned = 0;
      turn.paint();
      this.scroll();
    };
    const changed = () => { planned ||= requestAnimationFrame(paint); };
    const watch = setInterval(() => this.watch(turn), 1000);
    try {
      const finish = await complete(body, stopper.signal, {
        bytes: () => { turn.heardAt = performance.now(); },
        text: (text) => { turn.add(text); changed(); },
        tokens: (count) => { turn.count(count); changed(); },
      });
      turn.end(finish === 'length' ? 'cut at the token limit' : '');
      announce(`The answer is complete: ${turn.stats.textContent}.`);
      turn.hideNotice();
    } catch (error) {
      this.fail(turn, error, stopper.signal);
    } finally {
      clearInterval(watch);
      cancelAnimationFrame(planned);
      if (this.stopper === stopper) {
        this.stopper = null;
        this.onBusy(false);
      }
      this.scroll();
    }
  }

  fail(turn, error, signal) {
    if (signal.aborted) {
      turn.end('stopped');
      turn.hideNotice();
      announce('Stopped.');
      return;
    }
    turn.end('');
    let message = error.message;
    if (error instanceof ConnectionLost) {
      if (turn.text) message += ' What had arrived is kept above.';
      this.onLost();
    } else if (error instanceof KeyMissing) {
      message += ' The question was not sent.';
    }
    turn.say(message, true);
    announce(message);
  }

  /** A slow network or a full server: say that we still wait. */
  watch(turn) {
    const silent = performance.now() - turn.heardAt;
    if (silent >= SILENT_MS) {
      turn.say(`Nothing from the server for ${Math.round(silent / 1000)} s. Still waiting; Stop gives up.`, false);
    } else if (turn.notice.dataset.kind === 'wait') {
      turn.hideNotice();
    }
  }

  scroll() {
    if (this.follows) this.log.scrollTop = this.log.scrollHeight;
  }
}
