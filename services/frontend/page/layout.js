// The panels at the sides. The conversation always keeps its room: of the panels that the user has
// opened, the latest are shown as far as they fit; on a phone one covers the page.

import { byId } from './dom.js';

const WIDTHS = { chats: 16, settings: 19.5, engine: 19.5 }; // rem, as in the style sheet
const LEAST_CHAT = 360; // px
const NARROW = matchMedia('(max-width: 51.24em)');
const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);

export class Layout {
  /** `opened`: names of the panels that are open at first; `onChange(opened)` after each change. */
  constructor(opened, onChange) {
    this.opened = opened.filter((name) => name in WIDTHS); // the latest last
    this.cover = ''; // what covers a narrow page
    this.onChange = onChange;
    for (const name of Object.keys(WIDTHS)) {
      byId(`${name}-toggle`).addEventListener('click', () => this.toggle(name));
      byId(name).querySelector('.close').addEventListener('click', () => this.close(name));
    }
    addEventListener('resize', () => this.fit());
    NARROW.addEventListener('change', () => {
      this.cover = '';
      this.fit();
    });
    this.fit();
  }

  toggle(name) {
    if (byId(name).hidden) this.open(name);
    else this.close(name);
  }

  open(name) {
    if (NARROW.matches) this.cover = name;
    else this.opened = [...this.opened.filter((one) => one !== name), name];
    this.fit();
    if (NARROW.matches) byId(name).querySelector('.close').focus();
    this.onChange(this.opened);
  }

  close(name) {
    const inside = byId(name).contains(document.activeElement);
    this.cover = '';
    if (!NARROW.matches) this.opened = this.opened.filter((one) => one !== name);
    this.fit();
    this.onChange(this.opened);
    if (inside) byId(`${name}-toggle`).focus();
  }

  /** A covering panel gives way to the conversation. */
  uncover() {
    if (this.cover) this.close(this.cover);
  }

  fit() {
    const shown = new Set();
    if (NARROW.matches) {
      if (this.cover) shown.add(this.cover);
    } else {
      let room = innerWidth - LEAST_CHAT;
      for (const name of this.opened.toReversed()) {
        const width = WIDTHS[name] * rem();
        if (width <= room) {
          shown.add(name);
          room -= width;
        }
      }
    }
    for (const name of Object.keys(WIDTHS)) {
      byId(name).hidden = !shown.has(name);
      byId(`${name}-toggle`).setAttribute('aria-expanded', String(shown.has(name)));
    }
    document.querySelector('main').inert = this.cover !== ''; // what is covered takes no focus
  }
}
