// Elements are made one by one and texts are set as texts: nothing of the content is ever parsed as HTML.

const SVG = 'http://www.w3.org/2000/svg';

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === 'style') {
      for (const [property, setting] of Object.entries(value)) element.style.setProperty(property, setting);
    } else {
      element.setAttribute(name, value === true ? '' : String(value));
    }
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

function el(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function drawn(name, attributes, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function byId(id) {
  return document.getElementById(id);
}

// Replace the children of an element. The focus stays on the element with the same key, where there still is one.
function refill(element, ...children) {
  const focused = document.activeElement;
  const key = element.contains(focused) && focused.dataset ? focused.dataset.key : null;
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== false));
  if (!key) return;
  for (const candidate of element.querySelectorAll('[data-key]')) {
    if (candidate.dataset.key === key) candidate.focus({ preventScroll: true });
  }
}

function hidden(text) {
  return el('span', { class: 'visually-hidden' }, text);
}

// Tables may be wider than the screen, and texts long: then, and only then, the keyboard reaches and scrolls them.
function scroller(name, ...children) {
  return el('div', { class: 'scroller', 'data-name': name }, children);
}

function markScrollers() {
  for (const element of document.querySelectorAll('.scroller')) {
    const attributes = { tabindex: '0', role: 'region', 'aria-label': element.dataset.name };
    const overflows =
      element.scrollWidth > element.clientWidth + 1 || element.scrollHeight > element.clientHeight + 1;
    for (const [name, value] of Object.entries(attributes)) {
      if (overflows) element.setAttribute(name, value);
      else element.removeAttribute(name);
    }
  }
}

// A table with a caption; a row is a list of cells, of which the first is the row's header.
function table(caption, head, rows, attributes) {
  return scroller(
    caption,
    el(
      'table',
      attributes,
      el('caption', { class: 'visually-hidden' }, caption),
      el(
        'thead',
        {},
        el(
          'tr',
          {},
          head.map((cell) => el('th', { scope: 'col' }, cell)),
        ),
      ),
      el(
        'tbody',
        {},
        rows.map((row) =>
          el(
            'tr',
            {},
            row.map((cell, column) => (column ? el('td', {}, cell) : el('th', { scope: 'row' }, cell))),
          ),
        ),
      ),
    ),
  );
}

function disclosure(summary, ...children) {
  return el('details', {}, el('summary', {}, summary), children);
}

function card(title, attributes, ...children) {
  return el('section', { class: 'card', ...attributes }, el('h4', {}, title), children);
}

function announce(text) {
  byId('announcer').textContent = text;
}
