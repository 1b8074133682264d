// A conversation: its turns, its title, and what the model is sent of it.

import { Turn } from './turn.js';

const LONGEST_TITLE = 60;

function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return Array.from(bytes, (byte) => byte.toString(36).padStart(2, '0')).join('');
}

/** The beginning of a question, up to a whole word. */
export function titleOf(question) {
  const line = question.trim().replace(/\s+/g, ' ');
  if (line.length <= LONGEST_TITLE) return line;
  return `${line.slice(0, LONGEST_TITLE).replace(/\s\S*$/, '')}…`;
}

export class Conversation {
  constructor(id = newId()) {
    this.id = id;
    this.given = ''; // title that the user gave
    this.updated = Date.now();
    this.turns = [];
    this.cut = false; // the browser could not keep its beginning
    this.stopper = null; // while an answer is written
    this.removed = false;
  }

  get busy() { return this.stopper !== null; }

  get title() { return this.given || titleOf(this.turns[0]?.question ?? '') || 'New chat'; }

  record() {
    const { id, given, updated, cut } = this;
    return { id, given, updated, cut, turns: this.turns.map((turn) => turn.record()) };
  }

  /** The conversation of a record, or null where the record is none. */
  static from(id, record) {
    if (!Array.isArray(record?.turns)) return null;
    const found = new Conversation(id);
    found.turns = record.turns.map((one) => Turn.from(one)).filter(Boolean);
    if (!found.turns.length) return null;
    found.given = typeof record.given === 'string' ? record.given.slice(0, LONGEST_TITLE) : '';
    found.updated = Number(record.updated) || 0;
    found.cut = record.cut === true;
    return found;
  }

  rename(title) {
    this.given = title.trim().slice(0, LONGEST_TITLE);
  }

  /** What the model is sent for the next step of a turn: earlier answers without their thinking; failed questions are left out. */
  messages(turn, system) {
    const before = this.turns.slice(0, this.turns.indexOf(turn));
    return [
      ...(system ? [{ role: 'system', content: system }] : []),
      ...before.flatMap((one) => one.messages()),
      ...turn.asking(),
    ];
  }
}
