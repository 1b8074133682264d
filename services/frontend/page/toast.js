// A short message at the foot of the page, with a button where it can be undone.

import { announce, byId, make } from './dom.js';

const SHOWN_MS = 10_000;
let timer = 0;

export function toast(message, action = '', act = () => {}) {
  const node = byId('toast');
  const hide = () => {
    clearTimeout(timer);
    node.hidden = true;
  };
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(hide, SHOWN_MS);
  };
  node.replaceChildren(make('span', {}, message));
  if (action) {
    const button = make('button', { type: 'button' }, action);
    button.addEventListener('click', () => {
      hide();
      act();
    });
    node.append(button);
  }
  node.onpointerenter = node.onfocusin = () => clearTimeout(timer);
  node.onpointerleave = node.onfocusout = later;
  node.hidden = false;
  later();
  announce(message);
}
