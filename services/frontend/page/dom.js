// Small means to build the page's nodes. Text only ever goes in as text nodes.

export const byId = (id) => document.getElementById(id);

/** A new element: properties by name, `data-…` and `aria-…` as attributes, children or strings. */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes('-')) node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

const PATHS = {
  pen: 'M3 13l1-4 8-8 3 3-8 8zM10 3l3 3',
  tool: 'M13.5 4.5l-2.6 1.2-1.2-1.2 1.2-2.7a3.6 3.6 0 0 0-4.6 4.6L2 10.8 5.2 14l4.4-4.3a3.6 3.6 0 0 0 3.9-5.2z',
  bin: 'M2 4h12M6 4V2h4v2M4 4l1 10h6l1-10M7 7v4M9 7v4',
};

/** A small picture, 16 units wide, in the colour of the text around it. */
export function icon(name) {
  const [svg, path] = ['svg', 'path'].map((tag) => document.createElementNS('http://www.w3.org/2000/svg', tag));
  svg.setAttribute('viewBox', '0 0 16 16');
  svg.setAttribute('class', 'icon');
  svg.setAttribute('aria-hidden', 'true');
  path.setAttribute('d', PATHS[name]);
  svg.append(path);
  return svg;
}

/** Say it to screen readers once, apart from the text that streams. */
export function announce(text) {
  byId('announcer').textContent = text;
}

/** Copy, also where the clipboard API is missing (plain http on another host). */
export async function copy(text, button) {
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    const area = make('textarea', { value: text, className: 'unseen' });
    document.body.append(area);
    area.select();
    done = document.execCommand('copy');
    area.remove();
    button.focus();
  }
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  button.textContent = done ? 'Copied' : 'Copying failed';
  announce(button.textContent);
  setTimeout(() => { button.textContent = before; }, 1500);
}
