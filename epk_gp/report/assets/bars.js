// Bars on both sides of zero. The sign is the side, the mark and the hatching, and only then the colour.

const MOST_ROWS = 12; // bars of a chart; the others are one bar with their number and sum

function track(value, scale, attributes) {
  const share = scale ? Math.min(Math.abs(value) / scale, 1) : 0;
  const half = { '--length': `${(50 * share).toFixed(3)}%` };
  const kind = value < 0 ? 'lowers' : 'raises';
  return el('span', { class: 'track both', 'aria-hidden': 'true', ...attributes },
    el('span', { class: `fill ${kind}`, style: half }));
}

// A bar that begins at the edge: for tables whose rows all have one sign.
function sideTrack(value, scale) {
  const share = scale ? Math.min(Math.abs(value) / scale, 1) : 0;
  const kind = value < 0 ? 'lowers' : 'raises';
  return el('span', { class: `track side ${kind}-side`, 'aria-hidden': 'true' },
    el('span', { class: `fill ${kind}`, style: { '--length': `${(100 * share).toFixed(3)}%` } }));
}

function mark(value) {
  if (!value) return el('span', { class: 'mark', 'aria-hidden': 'true' }, '·');
  return el('span', { class: `mark ${value < 0 ? 'lowers' : 'raises'}`, 'aria-hidden': 'true' }, value < 0 ? '▼' : '▲');
}

// Rows {name, value, source} as bars; with many rows, the largest ones and the sum of the others.
function signedBars(caption, head, rows) {
  const order = [...rows].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const kept = new Set(rows.length > MOST_ROWS ? order.slice(0, MOST_ROWS - 1) : order);
  const others = rows.filter((row) => !kept.has(row));
  const shown = rows.filter((row) => kept.has(row));
  if (others.length) {
    shown.push({ name: `${countText(others.length)} others together`, value: total(others.map((row) => row.value)),
      source: `sum of others: ${others.map((row) => row.source).join(' ')}`, rest: true });
  }
  const scale = Math.max(...shown.map((row) => Math.abs(row.value)), 0);
  const decimals = decimalsFor(shown.map((row) => row.value));
  return table(caption, head, shown.map((row) => [
    row.name,
    [mark(row.value), quantity(row.value, row.source, { decimals })],
    track(row.value, scale),
  ]), { class: 'bars' });
}
