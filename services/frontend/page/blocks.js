// The blocks of an answer: paragraphs, headings, lists, quotes, tables, code. A block that has not
// changed keeps its nodes, and with them the reader's selection, scrolling and focus.

import { copy, make } from './dom.js';
import { inline } from './inline.js';

const DEEPEST = 24; // levels of nested lists and quotes; what is deeper is shown as it was written

const blockTokens = (token) => token.tokens.filter((one) => one.type !== 'space' && one.type !== 'def');

/** Text with marks in one element. */
class Line {
  constructor(token) {
    this.node = make(this.tag(token));
    this.update(token);
  }

  tag() { return 'p'; }

  update(token) { this.node.replaceChildren(...inline(token.tokens)); }
}

/** The text of a list's item without a paragraph around it. */
class ItemLine extends Line {
  tag() { return 'span'; }

  update(token) { this.node.replaceChildren(...inline(token.tokens ?? [token])); }
}

/** The answer stands below the page's own two levels. */
class Heading extends Line {
  tag({ depth }) { return `h${Math.min(depth + 2, 6)}`; }
}

/** What is not Markdown, or must not be: HTML, for one. */
class Plain {
  constructor(token) {
    this.node = make('p');
    this.update(token);
  }

  update({ raw }) { this.node.textContent = raw.replace(/\s+$/, ''); }
}

class Rule {
  constructor() { this.node = make('hr'); }

  update() {}
}

class Checkbox {
  constructor(token) { [this.node] = inline([token]); }

  update({ checked }) { this.node.checked = checked; }
}

class Code {
  constructor(token) {
    this.text = document.createTextNode('');
    this.info = make('span');
    const button = make('button', { type: 'button', className: 'quiet small' }, 'Copy');
    button.addEventListener('click', () => copy(this.text.data, button));
    this.pre = make('pre', { tabIndex: 0 }, make('code', {}, this.text));
    this.node = make('div', { className: 'code' },
      make('div', { className: 'code-head' }, this.info, button), this.pre);
    this.update(token);
  }

  update({ text, lang }) {
    const info = lang?.trim() ?? '';
    this.info.textContent = info || 'code';
    this.pre.setAttribute('aria-label', info ? `Code, ${info}` : 'Code');
    if (text.startsWith(this.text.data)) this.text.appendData(text.slice(this.text.data.length));
    else this.text.data = text;
  }
}

class Group {
  constructor(token, depth) {
    this.node = make(this.tag(token));
    this.list = new BlockList(this.node, depth + 1);
    this.update(token);
  }

  update(token) { this.list.update(this.parts(token), 0); }
}

class Quote extends Group {
  tag() { return 'blockquote'; }

  parts(token) { return blockTokens(token); }
}

class Item extends Quote {
  tag() { return 'li'; }

  update(token) {
    super.update(token);
    this.node.classList.toggle('task', token.task);
  }
}

class List extends Group {
  tag({ ordered }) { return ordered ? 'ol' : 'ul'; }

  parts({ items }) { return items; }

  update(token) {
    super.update(token);
    if (token.ordered) this.node.start = token.start;
  }
}

class Table {
  constructor(token) {
    this.head = make('thead');
    this.body = make('tbody');
    this.node = make('div', { className: 'table', tabIndex: 0, role: 'group', 'aria-label': 'Table' },
      make('table', {}, this.head, this.body));
    this.rows = [];
    this.update(token);
  }

  update({ header, rows, align }) {
    this.head.replaceChildren(row('th', header, align));
    rows.forEach((cells, index) => {
      const key = `${align}\n${cells.map(({ text }) => text).join('\n')}`;
      if (this.rows[index] === key) return;
      this.rows[index] = key;
      const made = row('td', cells, align);
      if (this.body.children[index]) this.body.children[index].replaceWith(made);
      else this.body.append(made);
    });
    this.rows.length = rows.length;
    while (this.body.children.length > rows.length) this.body.lastChild.remove();
  }
}

function row(tag, cells, align) {
  return make('tr', {}, ...cells.map(({ tokens }, column) => (
    make(tag, { className: align[column] ?? '' }, ...inline(tokens)))));
}

const KINDS = {
  paragraph: Line, text: ItemLine, heading: Heading, hr: Rule, code: Code, checkbox: Checkbox,
  blockquote: Quote, list: List, list_item: Item, table: Table,
};

/** What must be the same for a block's nodes to stay: its text, and what decides its elements. */
const keyOf = (token) => `${kindOf(token)} ${token.raw}`;
const kindOf = ({ type, depth, ordered, loose }) => [type, depth, ordered, loose].join();

export class BlockList {
  constructor(container, depth = 0) {
    this.container = container;
    this.depth = depth;
    this.entries = [];
  }

  clear() {
    this.entries = [];
    this.container.replaceChildren();
  }

  /** Show `tokens` from the block with number `first` on, in place of those that stand there. */
  update(tokens, first) {
    const { entries } = this;
    tokens.forEach((token, index) => {
      const at = first + index;
      const key = keyOf(token);
      const entry = entries[at];
      if (entry?.key === key) return;
      if (entry?.kind === kindOf(token)) entry.block.update(token);
      else this.replace(at, token);
      Object.assign(entries[at], { key, kind: kindOf(token) });
    });
    for (const { block } of entries.splice(first + tokens.length)) block.node.remove();
  }

  replace(at, token) {
    const Kind = this.depth < DEEPEST ? KINDS[token.type] ?? Plain : Plain;
    const block = new Kind(token, this.depth);
    if (this.entries[at]) this.entries[at].block.node.replaceWith(block.node);
    else this.container.append(block.node);
    this.entries[at] = { block };
  }
}
