// The running sum from the initial to the final output, drawn at the width at which it is shown.

const HEIGHT = 210;
const MARGIN = { left: 62, right: 18, top: 14, bottom: 38 };

// Some three to five round values that span the interval.
function roundTicks(low, high) {
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / 3));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => span / size <= 6) || 10 * power;
  const ticks = [];
  for (let tick = Math.ceil(low / step); tick * step <= high + 1e-12 * span; tick += 1) ticks.push(tick * step);
  return { ticks, decimals: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function spaced(ticks, pixels) {
  const every = Math.ceil(ticks.length / Math.max(2, Math.floor(pixels / 56)));
  return ticks.filter((tick, index) => index % every === 0 || index === ticks.length - 1);
}

function stepsChart(state, explanation, width) {
  const running = explanation.running.map((value) => value * content.quantum);
  const ends = [content.ranges[0][0], ...content.ranges.map((range) => range[1])];
  const low = Math.min(...running);
  const high = Math.max(...running);
  const room = (high - low) * 0.2 || 0.5;
  const { ticks, decimals } = roundTicks(low - room, high + room);
  const span = ends[ends.length - 1] - ends[0] || 1;
  const x = (step) => MARGIN.left + ((step - ends[0]) / span) * (width - MARGIN.left - MARGIN.right);
  const y = (value) =>
    MARGIN.top + ((high + room - value) / (high - low + 2 * room)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const bottom = HEIGHT - MARGIN.bottom;
  const chosen = state.steps === ALL ? null : content.ranges[Number(state.steps)];
  const line = running
    .map((value, index) => `${index ? 'L' : 'M'}${x(ends[index]).toFixed(1)} ${y(value).toFixed(1)}`)
    .join('');
  return drawn(
    'svg',
    {
      class: 'chart',
      viewBox: `0 0 ${width} ${HEIGHT}`,
      width,
      height: HEIGHT,
      role: 'img',
      'aria-label': [
        `The running sum of ${content.outputs.name} over the steps`,
        `from ${exactText(explanation.initial)} to ${exactText(explanation.network)}`,
      ].join(', '),
    },
    chosen
      ? drawn('rect', {
          class: 'chosen',
          x: x(chosen[0]),
          width: x(chosen[1]) - x(chosen[0]),
          y: MARGIN.top,
          height: bottom - MARGIN.top,
        })
      : null,
    ticks.map((tick) => [
      drawn('line', { class: 'grid', x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
      drawn(
        'text',
        { class: 'tick', x: MARGIN.left - 8, y: y(tick) + 4, 'text-anchor': 'end' },
        tick.toFixed(decimals).replace('-', MINUS),
      ),
    ]),
    drawn('line', { class: 'axis', x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
    spaced(ends, width - MARGIN.left - MARGIN.right).map((end) =>
      drawn('text', { class: 'tick', x: x(end), y: bottom + 16, 'text-anchor': 'middle' }, countText(end)),
    ),
    drawn(
      'text',
      { class: 'tick', x: (MARGIN.left + width - MARGIN.right) / 2, y: HEIGHT - 5, 'text-anchor': 'middle' },
      'steps of training',
    ),
    drawn('path', { class: 'line', d: line }),
    running.map((value, index) =>
      drawn(
        'circle',
        { class: 'dot', cx: x(ends[index]), cy: y(value), r: index === 0 || index === running.length - 1 ? 4.5 : 3 },
        drawn('title', {}, `after ${countText(ends[index])} steps: ${exactText(explanation.running[index])}`),
      ),
    ),
    [
      [0, 1],
      [running.length - 1, running.length - 2],
    ].map(([index, next]) =>
      drawn(
        'text',
        {
          class: 'end-value',
          x: x(ends[index]) + (index ? 4 : -2),
          y: y(running[index]) + (running[index] < running[next] ? 18 : -10), // off the curve
          'text-anchor': index ? 'end' : 'start',
        },
        shortText(explanation.running[index], decimalsFor(explanation.running)),
      ),
    ),
  );
}

function stepsTable(state, explanation) {
  const source = sourceOf(state);
  const decimals = decimalsFor(explanation.running);
  const rows = content.ranges.map((range, number) => {
    const change = explanation.views[viewKey(ALL, number)].total;
    return [
      el('a', { href: linkTo({ steps: String(number) }), 'data-key': `steps ${number}` }, stepsName(number)),
      [mark(change), quantity(change, `${source}.views.${viewKey(ALL, number)}.total`, { decimals })],
      quantity(explanation.running[number + 1], `${source}.running.${number + 1}`, { decimals, always: false }),
    ];
  });
  rows.unshift([
    'before training',
    '',
    quantity(explanation.running[0], `${source}.running.0`, { decimals, always: false }),
  ]);
  return table('Running sum over the ranges of steps', ['Steps', 'Change', 'Output after them'], rows);
}
