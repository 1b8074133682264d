// Calls to the server: the API key, server-sent events, and errors that say what happened.

import { byId } from './dom.js';

const STORED = 'penstock-api-key';

/** The server answered with an error; the message is its own. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The server could not be reached, or the connection broke. */
export class ConnectionLost extends Error {}

/** The key is wanted, and the user did not give one. */
export class KeyMissing extends Error {}

let key = '';
try {
  key = sessionStorage.getItem(STORED) ?? '';
} catch { /* storage is switched off: the key lives as long as the page */ }

export const hasKey = () => key !== '';

export function setKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(STORED, value);
    else sessionStorage.removeItem(STORED);
  } catch { /* as above */ }
  byId('forget-key').hidden = !value;
  document.dispatchEvent(new Event('keychange'));
}

let asking = null;

/** Ask for a key; all callers share one dialog. Rejects with KeyMissing. */
function askForKey(reason) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = byId('key-dialog');
    const field = byId('key');
    byId('key-reason').textContent = reason;
    field.value = '';
    const done = (event) => {
      event.preventDefault();
      const given = field.value.trim();
      if (!/^[\x21-\x7e]+$/.test(given)) {
        byId('key-reason').textContent = 'A key has no spaces and only ASCII characters.';
        return;
      }
      setKey(given);
      dialog.close('given');
    };
    byId('key-form').addEventListener('submit', done);
    byId('key-cancel').addEventListener('click', () => dialog.close(''), { once: true });
    dialog.addEventListener('close', () => {
      byId('key-form').removeEventListener('submit', done);
      asking = null;
      if (dialog.returnValue === 'given') resolve();
      else reject(new KeyMissing('This server wants an API key.'));
    }, { once: true });
    dialog.returnValue = '';
    dialog.showModal();
  });
  return asking;
}

/**
 * fetch with the key. On 401 the user is asked and the call made again, unless `ask` is false.
 * Throws ServerError, ConnectionLost, KeyMissing, and AbortError when `init.signal` is aborted.
 */
export async function call(path, init = {}, ask = true) {
  for (;;) {
    const used = key;
    const headers = { ...init.headers };
    if (used) headers.Authorization = `Bearer ${used}`;
    let response;
    try {
      response = await fetch(path, { ...init, headers });
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new ConnectionLost('The server cannot be reached.');
    }
    if (response.ok) return response;
    if (response.status !== 401) throw await serverError(response);
    if (!ask) throw new KeyMissing('This server wants an API key.');
    if (used === key) {
      await askForKey(used ? 'The server does not accept this key.' : 'This server wants an API key.');
    }
  }
}

async function serverError(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch { /* a proxy's page, or cut off: the status must do */ }
  return new ServerError(message, response.status);
}

/**
 * One chat completion, streamed. `on.bytes()` for whatever arrives, `on.delta(delta)` for each of its
 * deltas, `on.tokens(count)` for the tokens so far. Returns the finish reason.
 */
export async function complete(body, signal, on) {
  const response = await call('v1/chat/completions', {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    }),
    signal,
  });
  on.bytes();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    return await readEvents(reader, signal, on);
  } catch (error) {
    reader.cancel().catch(() => {});
    throw error;
  }
}

async function readEvents(reader, signal, on) {
  let rest = '';
  let finish = null;
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (signal.aborted) throw signal.reason;
      part = { done: true };
    }
    if (part.done) {
      throw new ConnectionLost('The connection to the server was lost before the answer was complete.');
    }
    on.bytes();
    const lines = (rest + part.value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data: ')) continue;
      const data = line.slice(6);
      if (data === '[DONE]') return finish;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message, 0);
      const choice = event.choices[0];
      if (choice?.delta) on.delta(choice.delta);
      if (event.usage) on.tokens(event.usage.completion_tokens);
      finish = choice?.finish_reason ?? finish;
    }
  }
}
