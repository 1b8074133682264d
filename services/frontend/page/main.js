// Puts the page together: what the buttons and keys do, and what is shown when.

import { hasKey, setKey } from './api.js';
import { Chat } from './chat.js';
import { Conversation } from './conversation.js';
import { byId, make } from './dom.js';
import { Layout } from './layout.js';
import { Library } from './library.js';
import { ModelChoice } from './models.js';
import { Panel, modelFacts } from './panel.js';
import { Settings } from './settings.js';
import { StatusPoller } from './status.js';
import { readSettings, tab, writeSettings } from './storage.js';
import { toast } from './toast.js';

const question = byId('question');
const settings = new Settings();
const models = new ModelChoice();
const panel = new Panel();
const kept = readSettings().panels;
const layout = new Layout(Array.isArray(kept) ? kept : ['engine', 'chats'], (panels) => {
  writeSettings({ panels });
  if (panel.isSeen) poller.wake();
});

// --- the server's state

const DOTS = { ready: 'ready', starting: 'loading', draining: 'draining', key: 'starting', lost: 'lost' };

const poller = new StatusPoller({
  watched: () => panel.isSeen || chat.busy,
  onState(state, status) {
    panel.enter(state, status);
    if (status) showModel(status);
    byId('model-dot').dataset.phase = DOTS[state];
    byId('model-dot').title = state;
    if (state === 'ready') settings.load();
    showBanner(state, status);
  },
});

function showModel(status) {
  const names = status.models.map((model) => model.name);
  if (names.length) models.offer(names);
  byId('model-facts').textContent = modelFacts(status).map(([label, text]) => (label === 'Context' ? `${text} of context` : text)).join(' · ');
}

function bannerText(state, status) {
  if (state === 'lost') return 'The server does not answer. Trying again every second.';
  if (state === 'key') return 'This server wants an API key.';
  if (state === 'draining') return 'The server is going down. It finishes the answers that it has begun and takes no new questions.';
  if (state === 'ready') return '';
  const parts = Object.entries(status.parts).filter(([, text]) => text !== 'ready');
  return `The server is not ready yet. ${parts.map(([name, text]) => `${name}: ${text}`).join(', ')}.`;
}

let shownBanner = '';

function showBanner(state, status) {
  const text = bannerText(state, status);
  if (text === shownBanner) return;
  shownBanner = text;
  const node = byId('banner');
  node.dataset.kind = state;
  node.replaceChildren(text);
  if (state === 'key') {
    const button = make('button', { type: 'button' }, 'Enter the key');
    button.addEventListener('click', enterKey);
    node.append(' ', button);
  }
  node.hidden = !text;
}

/** The first call that needs the key asks for it. */
async function enterKey() {
  await settings.load();
  poller.wake();
}

// --- the conversations

let warned = false;

const library = new Library({
  show: (conversation) => {
    chat.show(conversation);
    layout.uncover();
    focusQuestion();
  },
  removed(conversation) {
    const wasShown = conversation === chat.current;
    conversation.stopper?.abort();
    if (wasShown) chat.show(new Conversation());
    toast(`“${conversation.title}” was deleted.`, 'Undo', () => {
      library.putBack(conversation);
      if (wasShown) chat.show(conversation);
    });
  },
  changed(conversation) {
    if (conversation.id !== chat.current.id) return;
    if (conversation === chat.current) showTitle(conversation);
    else chat.show(conversation);
  },
  unkept() {
    if (!warned) toast('This browser cannot keep this chat: it is lost when the page is closed.');
    warned = true;
  },
});

function showTitle(conversation) {
  document.title = conversation.turns.length ? `${conversation.title} – Penstock` : 'Penstock';
}

const chat = new Chat({
  library,
  first: library.chats.get(tab.chat) ?? new Conversation(),
  request() {
    const request = settings.request(() => layout.open('settings'));
    return request && { ...request, parameters: { ...models.parameters, ...request.parameters } };
  },
  onBusy(busy) {
    byId('send').hidden = busy;
    byId('stop').hidden = !busy;
    if (busy) poller.wake();
    else if ([document.body, byId('stop')].includes(document.activeElement)) focusQuestion();
  },
  onLost: () => poller.lost(),
  onShown(conversation) {
    tab.chat = conversation.id;
    showTitle(conversation);
  },
});

function newChat() {
  if (chat.current.turns.length) chat.show(new Conversation());
  layout.uncover();
  focusQuestion();
}

// --- the question

/** Not on a touch screen: there it would open the keyboard over the answer. */
function focusQuestion() {
  if (matchMedia('(pointer: fine)').matches) question.focus();
}

function grow() {
  question.style.height = 'auto';
  question.style.height = `${Math.min(question.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function send() {
  if (!chat.ask(question.value)) return;
  showTitle(chat.current);
  question.value = '';
  grow();
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
byId('new-chat').addEventListener('click', newChat);
chat.welcome.addEventListener('click', ({ target }) => {
  if (target.tagName !== 'BUTTON') return;
  const { tool } = target.dataset;
  if (tool && settings.useTool(tool)) toast('The model may call the clock from now on.', 'Settings', () => layout.open('settings'));
  chat.ask(target.textContent);
});
byId('forget-key').addEventListener('click', () => setKey(''));
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || byId('key-dialog').open) return;
  const side = document.activeElement?.closest('aside');
  if (chat.busy) chat.stop();
  else if (side) layout.close(side.id);
});

byId('forget-key').hidden = !hasKey();
focusQuestion();
enterKey();
