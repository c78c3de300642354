// Bars on both sides of zero. The sign is the side, the mark and the hatching, and only then the colour.

const MOST_ROWS = 12; // bars of a chart; the others are one bar with their number and sum

function track(value, scale, attributes) {
  const share = scale ? Math.min(Math.abs(value) / scale, 1) : 0;
  const half = { '--length': `${(50 * share).toFixed(3)}%` };
  const kind = value < 0 ? 'lowers' : 'raises';
  return el(
    'span',
    { class: 'track both', 'aria-hidden': 'true', ...attributes },
    el('span', { class: `fill ${kind}`, style: half }),
  );
}

// A bar that begins at the edge: for tables whose rows all have one sign.
function sideTrack(value, scale) {
  const share = scale ? Math.min(Math.abs(value) / scale, 1) : 0;
  const kind = value < 0 ? 'lowers' : 'raises';
  return el(
    'span',
    { class: `track side ${kind}-side`, 'aria-hidden': 'true' },
    el('span', { class: `fill ${kind}`, style: { '--length': `${(100 * share).toFixed(3)}%` } }),
  );
}

function mark(value) {
  if (!value) return el('span', { class: 'mark', 'aria-hidden': 'true' }, '·');
  const [kind, sign] = value < 0 ? ['lowers', '▼'] : ['raises', '▲'];
  return el('span', { class: `mark ${kind}`, 'aria-hidden': 'true' }, sign);
}

// Rows {name, value, source} as bars, and their sum; with many rows, the largest ones and the sum of the others.
function signedBars(caption, head, rows) {
  const all = {
    name: 'together',
    value: total(rows.map((row) => row.value)),
    source: `sum of ${rows.map((row) => row.source).join(' ')}`,
  };
  const order = [...rows].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const kept = new Set(rows.length > MOST_ROWS ? order.slice(0, MOST_ROWS - 1) : order);
  const others = rows.filter((row) => !kept.has(row));
  const shown = rows.filter((row) => kept.has(row));
  if (others.length) {
    const sources = others.map((row) => row.source).join(' ');
    shown.push({
      name: [count(others.length, `number of ${sources}`), ' others together'],
      value: total(others.map((row) => row.value)),
      source: `sum of ${sources}`,
    });
  }
  const bars = shown.length > 1 ? [...shown, all] : shown;
  const scale = Math.max(...bars.map((row) => Math.abs(row.value)), 0);
  const decimals = decimalsFor(bars.map((row) => row.value));
  return table(
    caption,
    head,
    bars.map((row) => [
      row.name,
      [row === all ? null : mark(row.value), quantity(row.value, row.source, { decimals, always: row !== all })],
      track(row.value, scale, row === all ? { class: 'track both end' } : {}),
    ]),
    { class: bars === shown ? 'bars' : 'bars with-sum' },
  );
}
