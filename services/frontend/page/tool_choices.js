// Which of the page's tools the model may call.

import { make } from './dom.js';
import { toolList } from './tools.js';

export class ToolChoices {
  constructor(container) {
    this.boxes = new Map();
    for (const { name, title, help } of toolList) {
      const box = make('input', { type: 'checkbox', id: `tool-${name}` });
      const text = make('p', { className: 'help', id: `${box.id}-help` }, help);
      box.setAttribute('aria-describedby', text.id);
      this.boxes.set(name, box);
      container.append(make('div', { className: 'field check' }, box, make('label', { htmlFor: box.id }, title), text));
    }
  }

  /** The names of those that are checked. */
  get names() { return [...this.boxes].filter(([, box]) => box.checked).map(([name]) => name); }

  /** Check these and no others; names that are not known are left out. */
  set names(names) {
    for (const [name, box] of this.boxes) box.checked = Array.isArray(names) && names.includes(name);
  }
}
