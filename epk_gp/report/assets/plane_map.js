// Pictures of the plane: the shown training points around a test point, and the map whose cells can be asked.

const SIDE = 300;

function planeExtent(points) {
  if (content.overview.map && content.overview.map.has_positions) return content.overview.map.extent;
  const bounds = [0, 1].map((axis) => {
    const values = points.map((position) => position[axis]);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const room = 0.08 * (high - low) || 1;
    return [low - room, high + room];
  });
  return bounds.flat();
}

function triangle(x, y, size, up, attributes) {
  const tip = up ? -size : size;
  return drawn('path', { d: `M${x} ${y + tip}L${x + size} ${y - tip}L${x - size} ${y - tip}Z`, ...attributes });
}

// All training points of the report in grey, those of the view as triangles whose size is their contribution.
function planeOf(state, point) {
  const samples = Object.entries(content.samples.shown).filter(([, sample]) => sample.position);
  const view = point.explanations[state.target].views[viewKey(state.layer, state.steps)];
  const [x0, x1, y0, y1] = planeExtent([point.input.position, ...samples.map(([, sample]) => sample.position)]);
  const at = (position) => [((position[0] - x0) / (x1 - x0)) * SIDE, ((y1 - position[1]) / (y1 - y0)) * SIDE];
  const rows = [...view.lowered, ...view.raised].filter((row) => sampleOf(row[0]) && sampleOf(row[0]).position);
  const largest = Math.max(...rows.map((row) => Math.abs(row[1])), 1);
  const [x, y] = at(point.input.position);
  return el(
    'figure',
    { class: 'plane' },
    drawn(
      'svg',
      {
        viewBox: `-8 -8 ${SIDE + 16} ${SIDE + 16}`,
        role: 'img',
        'aria-label': `${point.name} in the plane, with the training points that raised it and lowered it most`,
      },
      drawn('rect', { class: 'frame', x: -7.5, y: -7.5, width: SIDE + 15, height: SIDE + 15 }),
      samples.map(([, sample]) => {
        const [cx, cy] = at(sample.position);
        return drawn('circle', { class: 'other', cx, cy, r: 2 });
      }),
      rows.map((row) => {
        const [cx, cy] = at(sampleOf(row[0]).position);
        const size = 4 + 6 * Math.sqrt(Math.abs(row[1]) / largest);
        return triangle(cx, cy, size, row[1] > 0, { class: row[1] > 0 ? 'raises' : 'lowers' });
      }),
      drawn('path', { class: 'cross', d: `M${x - 7} ${y - 7}L${x + 7} ${y + 7}M${x - 7} ${y + 7}L${x + 7} ${y - 7}` }),
    ),
    el(
      'figcaption',
      { class: 'aside' },
      '✕ this point; ▲ raised and ▼ lowered, larger for more; dots are other training points of the report.',
    ),
  );
}

// The map. Its values are at nodes from edge to edge, or in the middle of categories, counted from the lower left
// corner, row by row; the training points behind are those of the cells of a coarser grid.
function shareOf(index, number, names) {
  if (names) return (index + 0.5) / number;
  return number > 1 ? index / (number - 1) : 0.5;
}

function placeOn(map, axis, index) {
  const [low, high] = map.extent.slice(2 * axis, 2 * axis + 2);
  const names = map.categories[axis];
  if (names) return names[index];
  const value = low + shareOf(index, map.shape[1 - axis]) * (high - low);
  return String(Number(value.toPrecision(4))).replace('-', MINUS);
}

const mapCursor = { row: 0, column: 0, key: null };

function cellText(map, row, column) {
  const cell = row * map.shape[1] + column;
  return {
    cell,
    x: placeOn(map, 0, column),
    y: placeOn(map, 1, row),
    predicted: classNames()[map.predicted[cell]],
  };
}

function samplesBehind(map, row, column) {
  const [ny, nx] = map.shape;
  const [my, mx] = map.coarse;
  const [ofX, ofY] = map.categories;
  const of = (index, number, cells, names) => Math.min(cells - 1, Math.floor(shareOf(index, number, names) * cells));
  const cell = of(row, ny, my, ofY) * mx + of(column, nx, mx, ofX);
  return { cell, samples: map.behind[cell] || [] };
}

// Lines through the spot that leave the spot itself free.
function cross(x, y) {
  return `M${x - 5} ${y}h3M${x + 2} ${y}h3M${x} ${y - 5}v3M${x} ${y + 2}v3`;
}

function showCell(map, overlay, panel) {
  const { row, column } = mapCursor;
  const [ny, nx] = map.shape;
  const { cell, x, y, predicted } = cellText(map, row, column);
  const behind = samplesBehind(map, row, column);
  const [x0, x1, y0, y1] = map.extent;
  const [ofX, ofY] = map.categories;
  overlay.replaceChildren(
    ...['cursor-edge', 'cursor'].map((kind) =>
      drawn('path', { class: kind, d: cross(shareOf(column, nx, ofX) * 100, 100 - shareOf(row, ny, ofY) * 100) }),
    ),
    ...behind.samples
      .map(sampleOf)
      .filter((sample) => sample && sample.position && map.has_positions)
      .flatMap((sample) => {
        const left = ((sample.position[0] - x0) / (x1 - x0)) * 100;
        const top = ((y1 - sample.position[1]) / (y1 - y0)) * 100;
        const place = `M${left} ${top}h0`;
        return ['behind-edge', 'behind'].map((kind) => drawn('path', { class: kind, d: place }));
      }),
  );
  const source = 'overview.map';
  refill(
    panel,
    el('p', {}, `${map.axes[0]} ${x}, ${map.axes[1]} ${y}`),
    el(
      'p',
      {},
      'Predicted ',
      el('strong', {}, predicted),
      ', wrong with probability ',
      percent(map.wrong[cell], `${source}.wrong.${cell}`),
      '.',
    ),
    map.far ? el('p', {}, 'Out-of-distribution score ', plainNumber(map.far[cell], `${source}.far.${cell}`, { decimals: 2 }), '.') : null,
    behind.samples.length ? el('p', {}, 'Training points behind it:') : null,
    el(
      'ul',
      { class: 'behind-list' },
      behind.samples.map((sample, index) =>
        el('li', {}, sampleCell(sample, `${source}.behind.${behind.cell}.${index}`)),
      ),
    ),
  );
}

function movedCursor(map, key) {
  const [ny, nx] = map.shape;
  const moves = {
    ArrowUp: [1, 0],
    ArrowDown: [-1, 0],
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    Home: [0, -nx],
    End: [0, nx],
    PageUp: [ny, 0],
    PageDown: [-ny, 0],
  };
  if (!(key in moves)) return false;
  mapCursor.row = Math.max(0, Math.min(ny - 1, mapCursor.row + moves[key][0]));
  mapCursor.column = Math.max(0, Math.min(nx - 1, mapCursor.column + moves[key][1]));
  return true;
}

function mapCard(map) {
  const [ny, nx] = map.shape;
  const [left, top, right, bottom] = map.area;
  mapCursor.row = Math.floor(ny / 2);
  mapCursor.column = Math.floor(nx / 2);
  const share = (value) => `${(100 * value).toFixed(3)}%`;
  const overlay = drawn('svg', { viewBox: '0 0 100 100', preserveAspectRatio: 'none', 'aria-hidden': 'true' });
  const panel = el('div', { class: 'map-panel', role: 'status', 'aria-live': 'polite' });
  const area = el(
    'div',
    {
      class: 'map-area',
      id: 'map',
      tabindex: 0,
      role: 'application',
      'aria-label': `${map.title}. Arrow keys move over its cells.`,
      style: { left: share(left), top: share(top), width: share(right - left), height: share(bottom - top) },
    },
    overlay,
  );
  const pointed = (event) => {
    const box = area.getBoundingClientRect();
    const at = (share, number, names) => (names ? Math.floor(share * number) : Math.round(share * (number - 1)));
    const column = at((event.clientX - box.left) / box.width, nx, map.categories[0]);
    const row = at(1 - (event.clientY - box.top) / box.height, ny, map.categories[1]);
    mapCursor.column = Math.max(0, Math.min(nx - 1, column));
    mapCursor.row = Math.max(0, Math.min(ny - 1, row));
    showCell(map, overlay, panel);
  };
  area.addEventListener('pointermove', pointed);
  area.addEventListener('pointerdown', pointed);
  area.addEventListener('keydown', (event) => {
    if (!movedCursor(map, event.key)) return;
    event.preventDefault();
    showCell(map, overlay, panel);
  });
  showCell(map, overlay, panel);
  const picture = parsedSvg(map.svg, 'map-', map.title);
  return el(
    'section',
    { class: 'card wide' },
    el('h3', {}, map.title),
    el('p', {}, map.sentence),
    el(
      'div',
      { class: 'map' },
      el('div', { class: 'map-picture', style: { 'max-width': picture.style.maxWidth } }, picture, area),
      el(
        'div',
        { class: 'map-side' },
        panel,
        el('p', { class: 'aside' }, 'Move the pointer over the map, or focus it and use the arrow keys.'),
      ),
    ),
  );
}
