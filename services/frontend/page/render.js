// A model's text on the page. It becomes text nodes in a few kinds of blocks, never markup.

import { copy, make } from './dom.js';

const MARK = /<think>|<\/think>|^ {0,3}(`{3,}|~{3,})[^\n`]*$/gm;
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*/g;

/**
 * The blocks of a text: {kind: 'text' | 'code' | 'think', text, info, closed}.
 * Tags inside code, and fences inside thinking, are plain text. A text that begins inside its
 * thinking (the prompt ended with <think>) is thinking up to the closing tag.
 */
export function parse(text) {
  let blocks = [];
  let open = null;
  let at = 0;
  const take = (end) => {
    if (open) open.text += text.slice(at, end);
    else blocks.push(...paragraphs(text.slice(at, end)));
  };
  for (const match of text.matchAll(MARK)) {
    const [mark, fence] = match;
    const end = match.index + mark.length;
    if (open?.kind === 'think') {
      if (mark !== '</think>') continue;
    } else if (open?.kind === 'code') {
      const closes = fence && fence[0] === open.fence[0] && fence.length >= open.fence.length;
      if (!closes || mark.trim() !== fence) continue;
    }
    take(match.index);
    at = end;
    if (open) {
      open.closed = true;
      open = null;
    } else if (mark === '</think>') {
      blocks = [{ kind: 'think', text: text.slice(0, match.index), closed: true }];
    } else {
      open = fence
        ? { kind: 'code', text: '', info: mark.trim().slice(fence.length).trim(), fence, closed: false }
        : { kind: 'think', text: '', closed: false };
      blocks.push(open);
    }
  }
  take(text.length);
  return blocks.filter((block) => block.kind === 'code' || block.text.trim() !== '');
}

const paragraphs = (text) => text.split(/\n{2,}/).map((one) => ({ kind: 'text', text: one }));

/** The text without its thinking: what goes back to the model as history. */
export function withoutThinking(text) {
  const closed = text.lastIndexOf('</think>');
  if (closed >= 0) return text.slice(closed + 8).trim();
  return /^\s*<think>/.test(text) ? '' : text;
}

class TextBlock {
  constructor() {
    this.node = make('p');
  }

  update({ text }) {
    const children = [];
    const trimmed = text.replace(/^\n+|\s+$/g, '');
    let at = 0;
    for (const match of trimmed.matchAll(INLINE)) {
      children.push(trimmed.slice(at, match.index));
      children.push(match[1] ? make('code', {}, match[1]) : make('strong', {}, match[2]));
      at = match.index + match[0].length;
    }
    this.node.replaceChildren(...children, trimmed.slice(at));
  }
}

class CodeBlock {
  constructor() {
    this.text = document.createTextNode('');
    this.info = make('span');
    const button = make('button', { type: 'button', className: 'quiet small' }, 'Copy');
    button.addEventListener('click', () => copy(this.text.data, button));
    this.pre = make('pre', { tabIndex: 0 }, make('code', {}, this.text));
    this.node = make('div', { className: 'code' },
      make('div', { className: 'code-head' }, this.info, button), this.pre);
  }

  update({ text, info }) {
    this.info.textContent = info || 'code';
    this.pre.setAttribute('aria-label', info ? `Code, ${info}` : 'Code');
    this.text.data = text.replace(/^\n|\n$/g, '');
  }
}

class ThinkBlock {
  constructor() {
    this.text = document.createTextNode('');
    this.summary = make('summary');
    this.node = make('details', { className: 'think' }, this.summary, make('div', {}, this.text));
  }

  update({ text, closed }) {
    this.text.data = text.trim();
    const words = text.trim().split(/\s+/).length;
    this.node.dataset.open = closed ? 'no' : 'yes';
    this.summary.textContent = closed ? `Thought, ${words} word${words > 1 ? 's' : ''}` : 'Thinking…';
  }
}

const KINDS = { text: TextBlock, code: CodeBlock, think: ThinkBlock };

/** Shows a growing text; what has not changed keeps its nodes (selection, folding, focus). */
export class TextView {
  constructor(container) {
    this.container = container;
    this.shown = [];
  }

  show(text) {
    const blocks = parse(text);
    blocks.forEach((block, index) => {
      let view = this.shown[index];
      if (view?.kind !== block.kind) {
        view?.block.node.remove();
        view = { kind: block.kind, block: new KINDS[block.kind]() };
        this.container.insertBefore(view.block.node, this.shown[index + 1]?.block.node ?? null);
        this.shown[index] = view;
      }
      if (view.text !== block.text || view.info !== block.info || view.closed !== block.closed) {
        Object.assign(view, { text: block.text, info: block.info, closed: block.closed });
        view.block.update(block);
      }
    });
    for (const view of this.shown.splice(blocks.length)) view.block.node.remove();
  }
}
