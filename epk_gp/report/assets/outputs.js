// What is known of a point's outputs: class probabilities, the values of a regression with their targets, scores.

const MOST_CLASSES = 12;

// What a regression predicts, with its target where that is known.
function valueLine(point, output, source) {
  if (!point.values) return null;
  const [value, target] = point.values[output];
  const name = classNames().length > 1 ? `${classNames()[output]}: ` : '';
  const number = (entry, column) => el('strong', {}, plainNumber(entry, `${source}.${output}.${column}`));
  return el(
    'p',
    {},
    `${name}the network predicts `,
    number(value, 0),
    target === undefined ? null : [', target ', number(target, 1)],
  );
}

function valueCard(state, point) {
  if (!point.values) return null;
  const known = point.values[0].length > 1;
  const head = known ? ['Output', 'Predicted', 'Target', 'Difference'] : ['Output', 'Predicted'];
  const rows = point.values.map((row, output) => [
    el(
      'a',
      {
        href: linkTo({ target: String(output) }),
        'data-key': `output ${output}`,
        'aria-current': String(output) === state.target ? 'true' : null,
      },
      classNames()[output],
    ),
    ...row.map((value, column) => plainNumber(value, `points.${state.point}.values.${output}.${column}`)),
  ]);
  return card('Prediction of the network', {}, table('Prediction of each output', head, rows));
}

// A probability as a bar, with the band of the process drawn over it.
function probabilityBar(value, band) {
  const percentOf = (share) => `${(100 * share).toFixed(2)}%`;
  return el(
    'span',
    { class: 'track side', 'aria-hidden': 'true' },
    el('span', { class: 'fill plain', style: { '--length': percentOf(value) } }),
    band
      ? el('span', { class: 'band', style: { '--from': percentOf(band[0]), '--length': percentOf(band[1] - band[0]) } })
      : null,
  );
}

// Whose probabilities the bars are, where that is known, and whether they agree with the network's class.
function probabilityNotes(point) {
  const whose = content.outputs.probabilities_of;
  const largest = point.probabilities.indexOf(Math.max(...point.probabilities));
  const notes = [];
  if (whose && whose !== 'network' && largest !== point.predicted)
    notes.push(
      `The network predicts ${labelName(point.predicted)}; here, ${labelName(largest)} is the most probable class.`,
    );
  if (point.band)
    notes.push('The band is that of the Gaussian process beside the network. Classes with a link are explained.');
  return notes.length ? el('p', { class: 'aside' }, notes.join(' ')) : null;
}

function probabilityCard(state, point) {
  if (!point.probabilities) return null;
  const source = `points.${state.point}`;
  const order = point.probabilities.map((value, number) => number);
  const few = order.length <= MOST_CLASSES;
  if (!few) order.sort((a, b) => point.probabilities[b] - point.probabilities[a] || a - b);
  const kept = few
    ? order
    : order.filter((number, rank) => rank < MOST_CLASSES || String(number) in point.explanations);
  const rows = kept.map((number) => {
    const explained = String(number) in point.explanations;
    const name = classNames()[number];
    const band = point.band ? point.band[number] : null;
    return el(
      'tr',
      { class: String(number) === state.target ? 'chosen' : null },
      el(
        'th',
        { scope: 'row' },
        explained
          ? el(
              'a',
              {
                href: linkTo({ target: String(number) }),
                'data-key': `class ${number}`,
                'aria-current': String(number) === state.target ? 'true' : null,
              },
              name,
            )
          : name,
        number === point.predicted ? hidden(' (predicted)') : null,
        number === point.label ? el('span', { class: 'aside' }, ' label') : null,
      ),
      el('td', { class: 'bar-cell' }, probabilityBar(point.probabilities[number], band)),
      el('td', {}, percent(point.probabilities[number], `${source}.probabilities.${number}`)),
      point.band
        ? el(
            'td',
            { class: 'aside band-cell' },
            percent(band[0], `${source}.band.${number}.0`),
            ' – ',
            percent(band[1], `${source}.band.${number}.1`),
          )
        : null,
    );
  });
  const left = order.length - kept.length;
  const whose = content.outputs.probabilities_of;
  return card(
    whose ? `Class probabilities of the ${whose}` : 'Class probabilities',
    {},
    scroller(
      'Class probabilities',
      el(
        'table',
        { class: 'probabilities' },
        el('caption', { class: 'visually-hidden' }, 'Probability of each class'),
        el(
          'thead',
          {},
          el(
            'tr',
            {},
            ['Class', 'Bar', 'Probability', ...(point.band ? ['Band'] : [])].map((text) =>
              el('th', { scope: 'col' }, text),
            ),
          ),
        ),
        el('tbody', {}, rows),
      ),
    ),
    left
      ? el('p', { class: 'aside' }, count(left, 'number of the other classes'), ' other classes are less probable.')
      : null,
    probabilityNotes(point),
  );
}

function scoreCard(state, point) {
  if (!point.scores.length) return null;
  return card(
    'Uncertainty',
    {},
    el(
      'dl',
      { class: 'scores' },
      point.scores.map(([name, value, sentence], number) =>
        el(
          'div',
          {},
          el('dt', {}, name),
          el(
            'dd',
            {},
            plainNumber(value, `points.${state.point}.scores.${number}.1`),
            el('span', { class: 'aside' }, sentence),
          ),
        ),
      ),
    ),
  );
}
