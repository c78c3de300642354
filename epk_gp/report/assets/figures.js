// Figures come as SVG text. They are parsed as XML, stripped of all that is not drawing, and take the theme's colours.

const THEMED = [
  [/#(1a1a1a|222222)\b/gi, 'var(--ink)'],
  [/#4d4d4d\b/gi, 'var(--edge)'],
  [/#777777\b/gi, 'var(--soft)'],
  [/#e3e3e3\b/gi, 'var(--grid)'],
  [/#e4e4e4\b/gi, 'var(--rest)'],
  [/#2166ac\b/gi, 'var(--raises)'],
  [/#b35806\b/gi, 'var(--lowers)'],
  [/#004d4f\b/gi, 'var(--good)'],
  [/#832db6\b/gi, 'var(--outside)'],
];
const NOT_DRAWING = 'script, foreignObject, metadata, iframe, animate, set, a';

// Of matplotlib's figures in pixels of a screen: their unit is a point.
function naturalWidth(viewBox) {
  return Math.round((Number(viewBox.split(/[ ,]+/)[2]) * 4) / 3);
}

function parsedSvg(text, prefix, title) {
  const themed = THEMED.reduce((svg, [colour, variable]) => svg.replace(colour, variable), text);
  const root = new DOMParser().parseFromString(themed, 'image/svg+xml').documentElement;
  if (root.nodeName !== 'svg') return el('p', { class: 'notice bad' }, 'This figure cannot be read.');
  for (const element of root.querySelectorAll(NOT_DRAWING)) element.remove();
  for (const element of [root, ...root.querySelectorAll('*')]) cleanAttributes(element, prefix);
  const view = root.getAttribute('viewBox');
  root.removeAttribute('width');
  root.removeAttribute('height');
  if (view) root.style.setProperty('max-width', `${naturalWidth(view)}px`);
  root.setAttribute('role', 'img');
  root.setAttribute('aria-label', title);
  return document.importNode(root, true);
}

// Names inside a figure get its prefix, since two figures may use the same; addresses of anything else are removed.
function cleanAttributes(element, prefix) {
  for (const { name, value } of [...element.attributes]) {
    if (name.startsWith('on')) element.removeAttribute(name);
    else if (name === 'id') element.setAttribute(name, prefix + value);
    else if (name === 'href' || name === 'xlink:href') {
      if (value.startsWith('#')) element.setAttribute(name, `#${prefix}${value.slice(1)}`);
      else if (!value.startsWith('data:image/')) element.removeAttribute(name);
    } else if (/url\(/.test(value)) element.setAttribute(name, value.replace(/url\((["']?)#/g, `url($1#${prefix}`));
  }
}

function figureTable(figure, source) {
  if (!figure.table) return null;
  const details = el('details', {}, el('summary', {}, 'Table of these numbers'));
  details.addEventListener('toggle', () => {
    if (details.open && details.children.length === 1)
      details.append(table(figure.title, figure.table.head, tableCells(figure.table.rows, `${source}.table.rows`)));
  });
  return details;
}

function figureCard(figure, number) {
  return el(
    'section',
    { class: 'card' },
    el('h3', {}, figure.title),
    el('p', {}, figure.sentence),
    el('div', { class: figure.id === 'far' ? 'figure light' : 'figure' }, parsedSvg(figure.svg, `figure${number}-`, figure.title)),
    figureTable(figure, `overview.figures.${number}`),
  );
}
