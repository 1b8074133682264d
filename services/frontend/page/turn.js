// A question and its answer: its steps, what was measured, and how it ended. No nodes here.

import { Step } from './step.js';

const MEASURABLE_MS = 20; // pieces that arrive within less were read at once

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
const speed = (rate) => `${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`;
const text = (value) => (typeof value === 'string' ? value : '');

export class Turn {
  constructor(question) {
    this.question = question;
    this.view = null; // where it is shown
    this.steps = [new Step()]; // the last one is the answer, those before it call tools
    this.state = 'waiting'; // then 'streaming', then 'ended'
    this.summary = ''; // of what was measured
    this.notice = null; // {message, retry}
    this.heardAt = this.step.began;
  }

  get step() { return this.steps.at(-1); }

  get empty() { return this.steps.every((step) => step.empty); }

  /** What is said in all steps. */
  get text() { return this.steps.map((step) => step.answer).filter(Boolean).join('\n\n'); }

  /** What is thought in all steps. */
  get thought() { return this.steps.map((step) => step.reasoning || step.text).filter(Boolean).join('\n\n'); }

  add(delta) {
    if (this.step.add(delta)) this.state = 'streaming';
  }

  /** The results of the tools go to the model: what comes now belongs to the next step. */
  next() {
    this.steps.push(new Step());
    this.heardAt = this.step.began;
  }

  /** Tokens per second after the first piece; from the question on where all came in one. */
  rate() {
    const sum = (part) => this.steps.reduce((total, step) => total + part(step), 0);
    const after = sum((step) => step.tokens - step.tokensAtFirst);
    const span = sum((step) => step.lastAt - step.firstAt);
    if (after > 0 && span >= MEASURABLE_MS) return (after * 1000) / span;
    if (this.state !== 'ended') return 0;
    const whole = sum((step) => (step.firstAt ? step.lastAt - step.began : 0));
    return whole ? (sum((step) => step.tokens) * 1000) / whole : 0;
  }

  measure(note = '') {
    const parts = [];
    const tokens = this.steps.reduce((total, step) => total + step.tokens, 0);
    if (tokens) parts.push(`${tokens} token${tokens > 1 ? 's' : ''}`);
    const [{ firstAt, began }] = this.steps;
    if (firstAt) parts.push(`first after ${seconds(firstAt - began)}`);
    const rate = this.rate();
    if (rate) parts.push(speed(rate));
    this.summary = [...parts, note].filter(Boolean).join(' · ');
  }

  end(note, notice = null) {
    this.state = 'ended';
    this.notice = notice;
    this.measure(note);
  }

  /** Its messages as history. One without an answer has none. */
  messages() {
    if (!this.step.answer) return [];
    return [{ role: 'user', content: this.question }, ...this.steps.flatMap((step) => step.messages(false))];
  }

  /** What asks for its next step: the question, and what the tools were asked and said. */
  asking() {
    return [{ role: 'user', content: this.question }, ...this.steps.slice(0, -1).flatMap((step) => step.messages(true))];
  }

  /** What is kept of it, as JSON. */
  record() {
    const { question, state, summary, notice } = this;
    const steps = this.steps.map((step) => step.record());
    return { question, steps, ended: state === 'ended', summary, notice: notice?.message ?? '' };
  }

  /** The turn of a record; null where it is none. Older records hold one text. */
  static from(record) {
    if (typeof record?.question !== 'string') return null;
    const turn = new Turn(record.question);
    turn.steps = (Array.isArray(record.steps) && record.steps.length ? record.steps : [record]).map((one) => Step.from(one));
    turn.state = 'ended';
    turn.summary = text(record.summary);
    if (record.ended !== true) turn.notice = { message: 'The page was closed before this answer was complete.', retry: true };
    else if (text(record.notice)) turn.notice = { message: record.notice, retry: true };
    return turn;
  }
}
