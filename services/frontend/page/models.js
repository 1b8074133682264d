// Which of the served models the next question is for. With one there is nothing to choose.

import { byId, make } from './dom.js';
import { readSettings, writeSettings } from './storage.js';

export class ModelChoice {
  constructor() {
    this.element = byId('model-choice');
    this.names = [];
    this.element.addEventListener('change', () => writeSettings({ model: this.element.value }));
  }

  /** What is served now; the choice stays where it can. */
  offer(names) {
    byId('model-name').textContent = names.join(', ');
    byId('model-name').hidden = names.length > 1;
    this.element.hidden = names.length < 2;
    if (names.join('\n') === this.names.join('\n')) return;
    const chosen = this.element.value || readSettings().model;
    this.names = names;
    this.element.replaceChildren(...names.map((name) => make('option', { value: name }, name)));
    if (names.includes(chosen)) this.element.value = chosen;
  }

  /** What goes with a question. */
  get parameters() { return this.names.length > 1 ? { model: this.element.value } : {}; }
}
