// A question and its answer: the text, what was measured, and how it ended. No nodes here.

const MEASURABLE_MS = 20; // pieces that arrive within less were read at once

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
const speed = (rate) => `${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`;
const text = (value) => (typeof value === 'string' ? value : '');

export class Turn {
  constructor(question) {
    this.question = question;
    this.view = null; // where it is shown
    this.begin();
  }

  begin() {
    this.text = '';
    this.state = 'waiting'; // then 'streaming', then 'ended'
    this.summary = ''; // of what was measured
    this.notice = null; // {message, retry}
    this.tokens = 0;
    this.firstAt = 0;
    this.lastAt = 0;
    this.tokensAtFirst = 0;
    this.began = performance.now();
    this.heardAt = this.began;
  }

  add(piece) {
    this.lastAt = performance.now();
    this.firstAt ||= this.lastAt;
    this.state = 'streaming';
    this.text += piece.replaceAll('\r', '');
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
    return this.state === 'ended' && this.firstAt ? (this.tokens * 1000) / (this.lastAt - this.began) : 0;
  }

  measure(note = '') {
    const parts = [];
    if (this.tokens) parts.push(`${this.tokens} token${this.tokens > 1 ? 's' : ''}`);
    if (this.firstAt) parts.push(`first after ${seconds(this.firstAt - this.began)}`);
    const rate = this.rate();
    if (rate) parts.push(speed(rate));
    this.summary = [...parts, note].filter(Boolean).join(' · ');
  }

  end(note, notice = null) {
    this.state = 'ended';
    this.notice = notice;
    this.measure(note);
  }

  /** What is kept of it, as JSON. */
  record() {
    const { question, state, summary, notice } = this;
    return { question, text: this.text, ended: state === 'ended', summary, notice: notice?.message ?? '' };
  }

  /** The turn of a record; null where it is none. */
  static from(record) {
    if (typeof record?.question !== 'string') return null;
    const turn = new Turn(record.question);
    turn.text = text(record.text);
    turn.state = 'ended';
    turn.summary = text(record.summary);
    if (record.ended !== true) turn.notice = { message: 'The page was closed before this answer was complete.', retry: true };
    else if (text(record.notice)) turn.notice = { message: record.notice, retry: true };
    return turn;
  }
}
