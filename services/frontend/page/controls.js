// The sampling controls, made from the server's own schema of its parameters.

import { make } from './dom.js';

const USUAL = ['max_tokens', 'temperature', 'top_p', 'seed']; // the others are folded
const NOT_SHOWN = ['n']; // the page shows one answer
const PLAIN_LIMIT = 1e6; // bounds beyond it are the number type's, and tell people nothing

const title = (name) => name[0].toUpperCase() + name.slice(1).replaceAll('_', ' ');

/** A bound that JavaScript can hold exactly, or undefined. */
const safe = (bound) => (Number.isSafeInteger(bound) || Math.abs(bound) < 2 ** 53 ? bound : undefined);

/** The step of a fraction is for the arrow keys; values between are as good. */
function wrong(node) {
  return !node.validity.valid && !(node.validity.stepMismatch && Number(node.step) < 1);
}

function rangeText({ minimum: low, maximum: high, maxItems }) {
  if (maxItems !== undefined) return `At most ${maxItems}.`;
  const parts = [low, high].map((one) => (one !== undefined && Math.abs(one) <= PLAIN_LIMIT ? one : null));
  if (parts[0] !== null && parts[1] !== null) return `${parts[0]} to ${parts[1]}.`;
  if (parts[0] !== null) return `At least ${parts[0]}.`;
  return '';
}

/** What holds where the field is empty. */
const fallbackText = ({ 'x-fallback': one }) => (one === undefined ? '' : `Default: the model’s own, else ${one}.`);

/** How each type is shown, read and checked. `read` returns undefined for what is not set. */
const TYPES = {
  number: (schema) => numberField(schema, 0.05),
  integer: (schema) => numberField(schema, 1),
  boolean: (schema) => {
    const usual = schema.default === true;
    const node = make('input', { type: 'checkbox', checked: usual });
    const read = () => (node.checked === usual ? undefined : node.checked);
    return { node, read, clear: () => { node.checked = usual; } };
  },
  array: (schema) => listField(schema),
};

function numberField(schema, step) {
  const node = make('input', { type: 'number', step, placeholder: 'x-fallback' in schema ? 'model’s own' : 'not set' });
  if (safe(schema.minimum) !== undefined) node.min = schema.minimum;
  if (safe(schema.maximum) !== undefined) node.max = schema.maximum;
  node.inputMode = step < 1 ? 'decimal' : 'numeric';
  const clear = () => { node.value = ''; };
  const read = () => (node.value === '' ? undefined : node.valueAsNumber);
  if (schema.minimum !== 0 || schema.maximum !== 1) return { node, read, clear };
  return { node, read, clear, slider: makeSlider(node) };
}

/** A slider beside the field of a share from 0 to 1. */
function makeSlider(node) {
  const slider = make('input', { type: 'range', min: 0, max: 1, step: 0.01, value: 1, tabIndex: -1 });
  slider.addEventListener('input', () => {
    node.value = slider.value;
    node.dispatchEvent(new Event('check'));
  });
  node.addEventListener('input', () => { slider.value = node.value || 1; });
  return slider;
}

function listField({ items, maxItems }) {
  const numbers = items?.type === 'integer';
  if (!numbers && items?.type !== 'string') return null;
  const node = make('textarea', { rows: 2, placeholder: 'not set; one on each line' });
  const clear = () => { node.value = ''; };
  const read = () => {
    const lines = node.value.split('\n').filter((line) => line !== '');
    return lines.length ? lines.map((line) => (numbers ? Number(line) : line)) : undefined;
  };
  node.addEventListener('input', () => {
    const values = read() ?? [];
    let problem = '';
    if (values.length > maxItems) problem = `At most ${maxItems} lines.`;
    else if (numbers && !values.every((one) => Number.isInteger(one) && one >= 0)) problem = 'Whole numbers, one on each line.';
    node.setCustomValidity(problem);
  });
  return { node, read, clear };
}

export class Controls {
  /** `usual`, `rare`: where the controls of both kinds go. */
  constructor(usual, rare) {
    this.usual = usual;
    this.rare = rare;
    this.fields = new Map();
  }

  /** Make a control for every parameter whose type the page can show. */
  build({ properties }) {
    const usual = USUAL.filter((name) => name in properties);
    const rare = Object.keys(properties).filter((name) => !USUAL.includes(name) && !NOT_SHOWN.includes(name));
    this.fields.clear();
    for (const [names, container] of [[usual, this.usual], [rare, this.rare]]) {
      container.replaceChildren();
      for (const name of names) {
        const field = TYPES[properties[name].type]?.(properties[name]);
        if (!field) continue;
        this.fields.set(name, field);
        container.append(this.row(name, properties[name], field));
      }
    }
  }

  row(name, schema, field) {
    const { node, slider } = field;
    node.id = `sampling-${name}`;
    node.name = name;
    const help = make('p', { className: 'help', id: `${node.id}-help` },
      [schema.description, rangeText(schema), fallbackText(schema)].filter(Boolean).join(' '));
    const problem = make('p', { className: 'problem', id: `${node.id}-problem` });
    node.setAttribute('aria-describedby', `${help.id} ${problem.id}`);
    const check = () => {
      problem.textContent = wrong(node) ? node.validationMessage : '';
      node.setAttribute('aria-invalid', String(wrong(node)));
    };
    node.addEventListener('input', check);
    node.addEventListener('check', check);
    slider?.setAttribute('aria-label', `${title(name)}, slider`);
    const label = make('label', { htmlFor: node.id }, title(name));
    if (node.type === 'checkbox') {
      return make('div', { className: 'field check' }, node, label, help, problem);
    }
    const parts = [label, node, slider, help, problem].filter(Boolean);
    return make('div', { className: node.type === 'number' ? 'field number' : 'field' }, ...parts);
  }

  clear() {
    for (const field of this.fields.values()) {
      field.clear();
      field.node.dispatchEvent(new Event('input'));
    }
  }

  /** The first control with a value that the server would refuse, or null. */
  firstInvalid() {
    for (const { node } of this.fields.values()) if (wrong(node)) return node;
    return null;
  }

  /** What the fields hold, as it was typed: texts, or for a checkbox whether it is checked. */
  raw() {
    const found = {};
    for (const [name, { node, read }] of this.fields) {
      if (node.type === 'checkbox') {
        if (read() !== undefined) found[name] = node.checked;
      } else if (node.value !== '') {
        found[name] = node.value;
      }
    }
    return found;
  }

  /** Fill the fields with what `raw` gave; what does not fit is left out. */
  restore(raw) {
    for (const [name, { node }] of this.fields) {
      const value = raw?.[name];
      if (node.type === 'checkbox' && typeof value === 'boolean') node.checked = value;
      else if (node.type !== 'checkbox' && typeof value === 'string') node.value = value;
      else continue;
      node.dispatchEvent(new Event('input'));
    }
  }

  /** How many of the folded ones are set. */
  rareSet() {
    return [...this.fields.values()].filter(({ node, read }) => this.rare.contains(node) && read() !== undefined).length;
  }

  /** The values that are set, by parameter name. */
  values() {
    const found = {};
    for (const [name, field] of this.fields) {
      const value = field.read();
      if (value !== undefined) found[name] = value;
    }
    return found;
  }
}
