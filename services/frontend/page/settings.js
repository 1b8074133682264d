// The system prompt, the tools and the sampling parameters: they are kept, and go with every question.

import { call } from './api.js';
import { Controls } from './controls.js';
import { byId } from './dom.js';
import { readSettings, writeSettings } from './storage.js';
import { ToolChoices } from './tool_choices.js';
import { offered } from './tools.js';

const LONGEST_KEPT = 100_000;

export class Settings {
  constructor() {
    this.system = byId('system');
    this.controls = new Controls(byId('controls'), byId('rare-controls'));
    this.tools = new ToolChoices(byId('tool-choices'));
    this.loading = false;
    const { system, tools } = readSettings();
    this.tools.names = tools;
    if (typeof system === 'string') this.system.value = system;
    const form = byId('settings-form');
    form.addEventListener('submit', (event) => event.preventDefault());
    form.addEventListener('input', () => this.changed());
    byId('reset').addEventListener('click', () => {
      this.system.value = '';
      this.tools.names = [];
      this.controls.clear();
      this.changed();
    });
  }

  get isLoaded() { return this.controls.fields.size > 0; }

  changed() {
    this.sum();
    const kept = { system: this.system.value.slice(0, LONGEST_KEPT), tools: this.tools.names };
    if (this.isLoaded) kept.sampling = this.controls.raw();
    writeSettings(kept);
  }

  /** Make the controls; this call asks for the key where one is wanted. */
  async load() {
    if (this.loading || this.isLoaded) return;
    this.loading = true;
    try {
      this.controls.build(await (await call('playground/schema')).json());
      this.controls.restore(readSettings().sampling);
      this.sum();
    } catch { /* the status says what is wrong, and this is called again */ }
    this.loading = false;
  }

  /** Offer this tool from now on. False where it was offered already. */
  useTool(name) {
    const { names } = this.tools;
    if (names.includes(name)) return false;
    this.tools.names = [...names, name];
    this.changed();
    return true;
  }

  /** How many rare ones are set: they are folded away. */
  sum() {
    const set = this.controls.rareSet();
    byId('rare-count').textContent = set ? `${set} set` : '';
  }

  /** What goes with the next question, or null where a value is wrong: `reveal` shows it then. */
  request(reveal) {
    const wrong = this.controls.firstInvalid();
    if (!wrong) {
      const tools = offered(this.tools.names);
      return { system: this.system.value.trim(), parameters: { ...this.controls.values(), ...(tools.length ? { tools } : {}) } };
    }
    reveal();
    const fold = wrong.closest('details');
    if (fold) fold.open = true;
    wrong.focus();
    return null;
  }
}
