// What survives a reload, in this browser's localStorage: conversations and settings, never the key.
// What cannot be read (another version, cut off, written by something else) is as if it were not there.

const VERSION = 1;
const PREFIX = `penstock:${location.pathname}:`; // several servers may share an origin
const CHAT = `${PREFIX}chat:`;
const MOST_CHATS = 50;
const MOST_CHAT_CHARS = 500_000;
const MOST_CHARS = 2_000_000; // browsers keep about five million characters of an origin

function read(key) {
  try {
    const found = JSON.parse(localStorage.getItem(key));
    return found?.version === VERSION ? found : null;
  } catch {
    return null;
  }
}

/** False where the browser keeps nothing, or nothing more. */
function write(key, value) {
  try {
    localStorage.setItem(key, value);
    return true;
  } catch {
    return false;
  }
}

function keys() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(CHAT));
  } catch {
    return [];
  }
}

export const readChat = (id) => read(CHAT + id);

/** The stored conversations' ids. */
export const chatIds = () => keys().map((key) => key.slice(CHAT.length));

/**
 * Keep a conversation {id, updated, turns, …}. Of a long one the first turns are left out, and the
 * conversations that were not touched for longest make room. False where it could not be kept.
 */
export function writeChat(chat) {
  const encode = (turns) => JSON.stringify({ ...chat, version: VERSION, turns, cut: chat.cut || turns.length < chat.turns.length });
  let { turns } = chat;
  let value = encode(turns);
  while (value.length > MOST_CHAT_CHARS && turns.length > 1) {
    turns = turns.slice(Math.ceil(turns.length / 4));
    value = encode(turns);
  }
  if (value.length > MOST_CHARS / 2) return false;
  makeRoom(chat.id, value.length);
  while (!write(CHAT + chat.id, value)) {
    if (!dropOldest(chat.id)) return false;
  }
  return true;
}

function makeRoom(id, length) {
  const others = keys().filter((key) => key !== CHAT + id);
  let used = length + others.reduce((sum, key) => sum + (localStorage.getItem(key)?.length ?? 0), 0);
  let count = others.length + 1;
  while (count > MOST_CHATS || used > MOST_CHARS) {
    const freed = dropOldest(id);
    if (!freed) return;
    used -= freed;
    count -= 1;
  }
}

/** Characters that became free; 0 where nothing was left to drop. */
function dropOldest(butNot) {
  const others = keys().filter((key) => key !== CHAT + butNot);
  if (!others.length) return 0;
  const age = (key) => Number(read(key)?.updated) || 0;
  const oldest = others.reduce((found, key) => (age(key) < age(found) ? key : found));
  const { length } = localStorage.getItem(oldest) ?? '';
  localStorage.removeItem(oldest);
  return length || 1;
}

export function removeChat(id) {
  try {
    localStorage.removeItem(CHAT + id);
  } catch { /* nothing was kept */ }
}

/** The settings as they were last written, or {}. */
export const readSettings = () => read(`${PREFIX}settings`) ?? {};

/** Change some of the settings and keep them. */
export const writeSettings = (changes) => write(`${PREFIX}settings`,
  JSON.stringify({ ...readSettings(), ...changes, version: VERSION }));

/** Which conversation this tab shows. */
export const tab = {
  get chat() {
    try {
      return sessionStorage.getItem(`${PREFIX}shown`) ?? '';
    } catch {
      return '';
    }
  },
  set chat(id) {
    try {
      sessionStorage.setItem(`${PREFIX}shown`, id);
    } catch { /* the next load shows an empty one */ }
  },
};

/** Call `act(id)` when another tab keeps or removes a conversation. */
export function onOtherTab(act) {
  addEventListener('storage', ({ key }) => {
    if (key?.startsWith(CHAT)) act(key.slice(CHAT.length));
  });
}
