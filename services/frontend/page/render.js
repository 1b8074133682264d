// A model's text on the page: its thinking, which folds itself when the answer begins, and its answer.

import { make } from './dom.js';
import { MarkdownView } from './markdown.js';
import { ThinkingSplit } from './thinking.js';

class Thought {
  constructor() {
    this.text = document.createTextNode('');
    this.summary = make('summary');
    this.body = make('div', {}, this.text);
    this.node = make('details', { className: 'think', hidden: true }, this.summary, this.body);
    this.chosen = false; // the reader has folded or unfolded it
    this.summary.addEventListener('click', () => { this.chosen = true; });
  }

  update(text, closed) {
    const thought = text?.trim() ?? '';
    this.node.hidden = !thought;
    if (this.node.hidden || (this.text.data === thought && closed === this.closed)) return;
    this.closed = closed;
    if (thought.startsWith(this.text.data)) this.text.appendData(thought.slice(this.text.data.length));
    else this.text.data = thought;
    this.node.dataset.goesOn = closed ? 'no' : 'yes';
    if (!this.chosen) this.node.open = !closed;
    if (!closed) {
      this.summary.textContent = 'Thinking…';
      this.body.scrollTop = this.body.scrollHeight; // its latest lines
      return;
    }
    const words = thought.split(/\s+/).length;
    this.summary.textContent = `Thought, ${words} word${words > 1 ? 's' : ''}`;
  }
}

/** Shows a growing text; what has not changed keeps its nodes. */
export class TextView {
  constructor(container) {
    this.thought = new Thought();
    this.body = make('div', { className: 'md' });
    container.replaceChildren(this.thought.node, this.body);
    this.split = new ThinkingSplit();
    this.markdown = new MarkdownView(this.body);
    this.thinks = false;
  }

  /** `reasoning`: the thinking where it came apart from the text, which may hold it else; `thinks`: it goes on. */
  show(text, ended, reasoning = '', thinks = false) {
    const { thought, answer, closed } = reasoning
      ? { thought: reasoning, answer: text, closed: !thinks }
      : this.split.split(text);
    if (thought !== null && !this.thinks) { // what looked like the answer was thinking
      this.thinks = true;
      this.body.replaceChildren();
      this.markdown = new MarkdownView(this.body);
    }
    this.thought.update(thought, closed || ended);
    this.markdown.show(answer.replace(/^\s*\n/, ''), ended);
  }
}
