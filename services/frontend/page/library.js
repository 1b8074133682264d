// All conversations of this browser, and their list on the page.

import { Conversation } from './conversation.js';
import { byId, icon, make } from './dom.js';
import { chatIds, onOtherTab, readChat, removeChat, writeChat } from './storage.js';

const SAVE_EVERY_MS = 2000; // while an answer is written

export class Library {
  /** `acts`: `show(chat)`, `removed(chat)`, `changed(chat)` by another tab, `unkept()`. */
  constructor(acts) {
    this.acts = acts;
    this.list = byId('chat-list');
    this.chats = new Map();
    this.shown = null;
    this.lastSave = 0;
    this.renames = false;
    this.leaves = false;
    for (const id of chatIds()) this.load(id);
    onOtherTab((id) => this.reload(id));
    addEventListener('pagehide', () => {
      for (const chat of this.chats.values()) if (chat.busy) this.save(chat);
      this.leaves = true; // what breaks now does so because the page is left
    });
    addEventListener('pageshow', () => { this.leaves = false; });
  }

  load(id) {
    const chat = Conversation.from(id, readChat(id));
    if (chat) this.chats.set(id, chat);
    return chat;
  }

  /** Another tab has written or removed this one. What is written here goes on. */
  reload(id) {
    const before = this.chats.get(id);
    if (before?.busy) return;
    const chat = this.load(id);
    if (chat) this.acts.changed(chat);
    else if (before !== this.shown) this.chats.delete(id);
    this.draw();
  }

  get newestFirst() {
    return [...this.chats.values()].sort((one, other) => other.updated - one.updated);
  }

  save(chat) {
    this.lastSave = performance.now();
    if (!chat.turns.length || chat.removed || this.leaves) return;
    const isNew = !this.chats.has(chat.id);
    this.chats.set(chat.id, chat);
    if (!writeChat(chat.record())) this.acts.unkept();
    if (isNew) this.draw();
  }

  /** While an answer is written: not with every piece. */
  saveSoon(chat) {
    if (performance.now() - this.lastSave >= SAVE_EVERY_MS) this.save(chat);
  }

  /** Its turns have changed: it becomes the first of the list. */
  touch(chat) {
    chat.updated = Date.now();
    this.save(chat);
    this.draw();
  }

  remove(chat) {
    chat.removed = true;
    this.chats.delete(chat.id);
    removeChat(chat.id);
    this.draw();
    this.acts.removed(chat);
  }

  putBack(chat) {
    chat.removed = false;
    this.save(chat);
    this.draw();
  }

  select(chat) {
    this.shown = chat;
    this.draw();
  }

  draw() {
    if (this.renames) return; // when that is done
    const focused = this.list.contains(document.activeElement) ? document.activeElement.id : '';
    const rows = this.newestFirst.map((chat) => this.row(chat));
    this.list.replaceChildren(...rows);
    byId('no-chats').hidden = rows.length > 0;
    if (focused) byId(focused)?.focus();
  }

  row(chat) {
    const open = make('button', { type: 'button', className: 'quiet open', id: `chat-${chat.id}`, title: chat.title }, chat.title);
    if (chat === this.shown) open.setAttribute('aria-current', 'true');
    open.addEventListener('click', () => this.acts.show(chat));
    const tool = (name, label, act) => {
      const button = make('button', {
        type: 'button', className: 'quiet tool', id: `${name}-${chat.id}`, title: label, 'aria-label': `${label}: ${chat.title}`,
      }, icon(name));
      button.addEventListener('click', act);
      return button;
    };
    const row = make('li', { className: chat.busy ? 'busy' : '' }, open,
      tool('pen', 'Rename', () => this.rename(chat, row)),
      tool('bin', 'Delete', () => this.remove(chat)));
    return row;
  }

  rename(chat, row) {
    const field = make('input', { value: chat.title, maxLength: 60, 'aria-label': 'Title of the chat' });
    this.renames = true;
    const done = (keep) => {
      if (!this.renames) return;
      this.renames = false;
      if (keep && field.value.trim() !== chat.title) {
        chat.rename(field.value);
        this.save(chat);
        this.acts.changed(chat);
      }
      this.draw();
    };
    field.addEventListener('blur', () => done(true));
    field.addEventListener('keydown', (event) => {
      if (event.isComposing || (event.key !== 'Enter' && event.key !== 'Escape')) return;
      event.stopPropagation();
      done(event.key === 'Enter');
      byId(`chat-${chat.id}`)?.focus();
    });
    row.replaceChildren(field);
    field.select();
  }
}
