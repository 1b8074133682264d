// Where a model's thinking ends and its answer begins.

const OPEN = '<think>';
const CLOSE = '</think>';
const FENCE = /^ {0,3}(`{3,}|~{3,})([^\n]*)/;

/**
 * Finds the end of the thinking in a growing text. Where the text does not begin with <think>, the
 * prompt may have ended with it: then all up to </think> is thinking, unless that stands in code.
 */
export class ThinkingSplit {
  constructor() {
    this.at = 0; // all before it is looked through
    this.end = -1; // of the thinking
    this.fence = ''; // that is open
  }

  /** {thought, answer, closed}; `thought` is null where there is none. */
  split(text) {
    const begins = text.trimStart();
    const opened = begins.startsWith(OPEN);
    if (!opened && OPEN.startsWith(begins)) return { thought: null, answer: '', closed: true };
    if (this.end < 0) this.end = opened ? this.findClose(text) : this.findInLines(text);
    const from = opened ? text.length - begins.length + OPEN.length : 0;
    if (this.end >= 0) {
      const answer = text.slice(this.end + CLOSE.length);
      return { thought: text.slice(from, this.end), answer, closed: true };
    }
    if (opened) return { thought: text.slice(from), answer: '', closed: false };
    return { thought: null, answer: text, closed: true };
  }

  findClose(text) {
    const found = text.indexOf(CLOSE, this.at);
    this.at = Math.max(0, text.length - CLOSE.length);
    return found;
  }

  findInLines(text) {
    for (;;) {
      const next = text.indexOf('\n', this.at);
      const line = text.slice(this.at, next < 0 ? text.length : next);
      const [, fence, info] = FENCE.exec(line) ?? [];
      const found = this.fence ? -1 : line.indexOf(CLOSE);
      if (found >= 0) return this.at + found;
      if (next < 0) return -1; // this line is looked at again
      const opens = fence && !(fence[0] === '`' && info.includes('`'));
      if (!this.fence && opens) this.fence = fence;
      else if (fence?.startsWith(this.fence) && !info.trim()) this.fence = '';
      this.at = next + 1;
    }
  }
}

/** The text without its thinking: what goes back to the model as history. */
export function withoutThinking(text) {
  return new ThinkingSplit().split(text).answer.trim();
}
