// The marks within a paragraph: emphasis, code, links. Tokens become nodes, text becomes text nodes.

import { make } from './dom.js';

const SAFE = new Set(['http:', 'https:', 'mailto:']);
const ENTITY = /&(?:amp|lt|gt|quot|apos|nbsp|#\d{1,7}|#x[\da-f]{1,6});/gi;
const NAMED = { amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: '\u00a0' };

/** The address that a link may lead to, or null: it is absolute, and opens a page or a mail. */
export function safeAddress(href) {
  try {
    const url = new URL(href);
    return SAFE.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** `&lt;` and its like as the character that they stand for. */
function decoded(text) {
  return text.replace(ENTITY, (entity) => {
    const name = entity.slice(1, -1).toLowerCase();
    if (name in NAMED) return NAMED[name];
    const code = name[1] === 'x' ? parseInt(name.slice(2), 16) : Number(name.slice(1));
    return code > 0 && code <= 0x10_ffff ? String.fromCodePoint(code) : entity;
  });
}

function link(token, ...children) {
  const href = safeAddress(token.href);
  if (href === null) return token.raw; // shown as it was written, so that nothing is hidden
  return make('a', { href, title: href, target: '_blank', rel: 'noopener noreferrer' }, ...children);
}

/** Each kind's node or string. A picture is a link: the page loads nothing from elsewhere. */
const KINDS = {
  text: (token) => (token.tokens ? make('span', {}, ...inline(token.tokens)) : decoded(token.text)),
  escape: (token) => token.text,
  strong: (token) => make('strong', {}, ...inline(token.tokens)),
  em: (token) => make('em', {}, ...inline(token.tokens)),
  del: (token) => make('del', {}, ...inline(token.tokens)),
  codespan: (token) => make('code', {}, token.text),
  br: () => make('br'),
  checkbox: (token) => make('input', {
    type: 'checkbox', checked: token.checked, disabled: true, 'aria-label': token.checked ? 'done' : 'to do',
  }),
  link: (token) => link(token, ...inline(token.tokens)),
  image: (token) => link(token, `Image: ${token.text || token.href}`),
  html: (token) => (/^<br\s*\/?>$/i.test(token.raw) ? make('br') : token.raw),
};

export function inline(tokens) {
  return tokens.map((token) => KINDS[token.type]?.(token) ?? token.raw);
}
