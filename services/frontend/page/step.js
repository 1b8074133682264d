// One request's part of an answer: what the model thought, said and called. No nodes here.

import { parseArguments } from './arguments.js';
import { withoutThinking } from './thinking.js';

const text = (value) => (typeof value === 'string' ? value : '');

/** A call of a tool; `result` is null until the tool has run. */
export class Call {
  constructor({ id, name, arguments: given, result, failed } = {}) {
    this.id = text(id);
    this.name = text(name);
    this.arguments = text(given);
    this.result = typeof result === 'string' ? result : null;
    this.failed = failed === true;
  }

  /** As the API takes it back. Some chat templates fail at arguments that are no object. */
  sent() {
    let { arguments: given } = this;
    try {
      parseArguments(given);
    } catch {
      given = JSON.stringify({ unreadable: given });
    }
    return { id: this.id, type: 'function', function: { name: this.name, arguments: given } };
  }
}

export class Step {
  constructor() {
    this.reasoning = '';
    this.text = '';
    this.calls = [];
    this.last = ''; // what grew last
    this.tokens = 0;
    this.firstAt = 0;
    this.lastAt = 0;
    this.tokensAtFirst = 0;
    this.began = performance.now();
  }

  get thinks() { return this.last === 'reasoning'; }

  get empty() { return !this.reasoning && !this.text && !this.calls.length; }

  /** What the model says in it, without its thinking. */
  get answer() { return this.reasoning ? this.text.trim() : withoutThinking(this.text); }

  /** A streamed delta of a chat completion; false where it holds nothing. */
  add({ reasoning, content, tool_calls: calls }) {
    if (!reasoning && !content && !calls?.length) return false;
    if (reasoning) {
      if (this.reasoning && !this.thinks) this.reasoning += '\n\n';
      this.reasoning += reasoning.replaceAll('\r', '');
      this.last = 'reasoning';
    }
    if (content) {
      this.text += content.replaceAll('\r', '');
      this.last = 'text';
    }
    for (const one of calls ?? []) this.addCall(one);
    this.lastAt = performance.now();
    this.firstAt ||= this.lastAt;
    return true;
  }

  addCall({ index, id, function: called }) {
    const call = this.calls[index] ?? new Call();
    if (!this.calls.includes(call)) this.calls.push(call);
    if (id) call.id = id;
    call.name += called?.name ?? '';
    call.arguments += called?.arguments ?? '';
    this.last = 'calls';
  }

  /** Tokens of it so far. */
  count(tokens) {
    if (this.firstAt && !this.tokensAtFirst) this.tokensAtFirst = tokens;
    if (tokens > this.tokens) this.lastAt = performance.now();
    this.tokens = tokens;
  }

  /** Its messages as history; `thinks`: with its thinking, which belongs to calls until all is answered. */
  messages(thinks) {
    const said = { role: 'assistant', content: this.answer };
    if (thinks && this.reasoning) said.reasoning = this.reasoning;
    if (!this.calls.length || !this.calls.every((call) => call.result !== null)) return [said];
    said.tool_calls = this.calls.map((call) => call.sent());
    const results = this.calls.map(({ id, name, result }) => ({ role: 'tool', tool_call_id: id, name, content: result }));
    return [said, ...results];
  }

  record() {
    const { reasoning, calls } = this;
    return { reasoning, text: this.text, calls };
  }

  static from(record) {
    const step = new Step();
    step.reasoning = text(record?.reasoning);
    step.text = text(record?.text);
    const calls = Array.isArray(record?.calls) ? record.calls : [];
    step.calls = calls.map((call) => new Call(call ?? {}));
    return step;
  }
}
