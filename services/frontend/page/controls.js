// The sampling controls, made from the server's own schema of its parameters.

import { make } from './dom.js';

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
  constructor(container) {
    this.container = container;
    this.fields = new Map();
  }

  /** Make a control for every parameter whose type the page can show. */
  build(schema) {
    this.container.replaceChildren();
    for (const [name, one] of Object.entries(schema.properties)) {
      const field = NOT_SHOWN.includes(name) ? null : TYPES[one.type]?.(one);
      if (field) {
        this.fields.set(name, field);
        this.container.append(this.row(name, one, field));
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
    const inputs = make('div', { className: 'inputs' }, node, ...(slider ? [slider] : []));
    return make('div', { className: 'field' }, label, inputs, help, problem);
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
