// Markdown as it streams in. Marked reads it into tokens; blocks.js makes nodes of them, so that no
// text of a model ever goes through an HTML parser.

import { Lexer } from './marked.js';
import { BlockList } from './blocks.js';

const LONGEST_INLINE = 10_000; // characters of a paragraph; some marks cost the square of it
const LIVE_BLOCKS = 2; // a table's first lines are a paragraph until its second line is whole

/** The blocks of a text. What is too long or too deep to be read as Markdown comes as it is. */
function read(text) {
  try {
    const lexer = new Lexer({ gfm: true });
    lexer.blockTokens(text, lexer.tokens);
    for (const { src, tokens } of lexer.inlineQueue) {
      if (src.length <= LONGEST_INLINE) lexer.inlineTokens(src, tokens);
      else tokens.push({ type: 'plain', raw: src });
    }
    return lexer.tokens;
  } catch { // thousands of nested quotes overflow its stack
    return Object.assign([{ type: 'plain', raw: text }], { links: {} });
  }
}

/**
 * Shows a growing text. Only the last blocks are read and made again; those before them are
 * finished, so the cost of a long answer grows with its length and not with its square.
 */
export class MarkdownView {
  constructor(container) {
    this.list = new BlockList(container);
    this.length = 0; // of the text whose blocks are finished
    this.count = 0; // of those blocks
  }

  /** `ended`: the text is whole. Then all of it is read once more, with links defined at its end. */
  show(text, ended) {
    if (ended) {
      const tokens = read(text);
      if (Object.keys(tokens.links).length) this.list.clear();
      this.length = this.count = 0;
      this.list.update(tokens.filter(visible), 0);
      return;
    }
    const tokens = read(text.slice(this.length));
    this.list.update(tokens.filter(visible), this.count);
    this.finish(tokens, text);
  }

  finish(tokens, text) {
    let left = tokens.filter(visible).length - LIVE_BLOCKS;
    for (const token of tokens) {
      if (left <= 0 || !text.startsWith(token.raw, this.length)) return;
      this.length += token.raw.length;
      if (visible(token)) {
        this.count += 1;
        left -= 1;
      }
    }
  }
}

const visible = (token) => token.type !== 'space' && token.type !== 'def';
