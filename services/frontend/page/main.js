// Puts the page together: what the buttons and keys do, and what is shown when.

import { call, hasKey, setKey } from './api.js';
import { Chat } from './chat.js';
import { Controls } from './controls.js';
import { byId } from './dom.js';
import { Panel } from './panel.js';

const WIDE = matchMedia('(min-width: 1180px)');
const MEDIUM = matchMedia('(min-width: 820px)');
const question = byId('question');
const controls = new Controls(byId('controls'));

// --- the two side panels

const sides = ['settings', 'engine'];

function showSide(name, shown) {
  byId(name).hidden = !shown;
  byId(`${name}-toggle`).setAttribute('aria-expanded', String(shown));
  if (shown && !WIDE.matches) {
    for (const other of sides) if (other !== name) showSide(other, false);
  }
  cover();
  if (name === 'engine') panel.wake();
}

/** On a phone a side panel covers the conversation: what is covered takes no focus. */
function cover() {
  document.querySelector('main').inert = !MEDIUM.matches && sides.some((name) => !byId(name).hidden);
}

function closeSide(name) {
  showSide(name, false);
  byId(`${name}-toggle`).focus();
}

// --- the server's state

function onState(state, status) {
  const names = status?.models.map((model) => model.name) ?? [];
  if (names.length) byId('model-name').textContent = names.join(', ');
  byId('model-dot').dataset.phase = { ready: 'ready', starting: 'loading', key: 'starting', lost: 'lost' }[state];
  byId('model-dot').title = state;
  byId('banner').dataset.kind = state;
  if (state === 'ready') {
    banner('');
    if (!controls.fields.size) loadSchema();
  } else if (state === 'lost') {
    banner('The server does not answer. Trying again every second.');
  } else if (state === 'key') {
    banner('This server wants an API key.', 'Enter the key', loadSchema);
  } else {
    const parts = Object.entries(status.parts).filter(([, text]) => text !== 'ready');
    banner(`The server is not ready yet. ${parts.map(([name, text]) => `${name}: ${text}`).join(', ')}.`);
  }
}

let bannerText = '';

function banner(text, action, act) {
  const node = byId('banner');
  if (text === bannerText) return;
  bannerText = text;
  node.replaceChildren(text);
  if (action) {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = action;
    button.addEventListener('click', act);
    node.append(' ', button);
  }
  node.hidden = !text;
}

const panel = new Panel(onState);

let loading = false;

/** The sampling controls; this call asks for the key where one is wanted. */
async function loadSchema() {
  if (loading) return;
  loading = true;
  try {
    controls.build(await (await call('playground/schema')).json());
  } catch { /* the panel's polling says what is wrong, and this is called again */ }
  loading = false;
  panel.wake();
}

// --- the conversation

function request() {
  const invalid = controls.firstInvalid();
  if (invalid) {
    showSide('settings', true);
    invalid.focus();
    return null;
  }
  return { system: byId('system').value.trim(), parameters: controls.values() };
}

const chat = new Chat({
  request,
  onBusy(busy) {
    byId('send').hidden = busy;
    byId('stop').hidden = !busy;
    if (!busy && (document.activeElement === document.body || document.activeElement === byId('stop'))) {
      focusQuestion();
    }
  },
  onLost() {
    panel.state = 'lost';
    panel.wake();
  },
});

/** Not on a touch screen: there it would open the keyboard over the answer. */
function focusQuestion() {
  if (matchMedia('(pointer: fine)').matches) question.focus();
}

function grow() {
  question.style.height = 'auto';
  question.style.height = `${Math.min(question.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function send() {
  if (chat.ask(question.value)) {
    question.value = '';
    grow();
  }
}

byId('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  send();
});
question.addEventListener('input', grow);
question.addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
byId('stop').addEventListener('click', () => chat.stop());
byId('new-chat').addEventListener('click', () => {
  chat.clear();
  focusQuestion();
});
byId('examples').addEventListener('click', ({ target }) => {
  if (target.tagName === 'BUTTON') chat.ask(target.textContent);
});
byId('settings-form').addEventListener('submit', (event) => event.preventDefault());
byId('reset').addEventListener('click', () => {
  byId('system').value = '';
  controls.clear();
});
byId('forget-key').addEventListener('click', () => setKey(''));
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || byId('key-dialog').open) return;
  const side = document.activeElement?.closest('aside');
  if (chat.busy) chat.stop();
  else if (side) closeSide(side.id);
});
for (const name of sides) {
  byId(`${name}-toggle`).addEventListener('click', () => {
    const shown = byId(name).hidden;
    showSide(name, shown);
    if (shown && !MEDIUM.matches) byId(name).querySelector('.close').focus();
  });
  byId(name).querySelector('.close').addEventListener('click', () => closeSide(name));
}

MEDIUM.addEventListener('change', cover);
showSide('settings', WIDE.matches);
showSide('engine', MEDIUM.matches);
byId('forget-key').hidden = !hasKey();
focusQuestion();
loadSchema();
