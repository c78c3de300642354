// The whole: how often predictions are right, figures, suspected labels and the map. Made when it is first shown.

function accuracyLine(overview) {
  if (overview.accuracy === null) return null;
  return el(
    'p',
    { class: 'large-number' },
    percent(overview.accuracy, 'overview.accuracy'),
    el(
      'span',
      { class: 'aside' },
      ' of ',
      count(overview.count, 'overview.count'),
      ` ${plural(overview.count, 'point', 'points')} predicted right`,
    ),
  );
}

// A list of training points: what is said of it, and a row for each of them.
function samplesCard(name, title, caption) {
  const list = content.overview[name];
  if (!list) return null;
  const source = `overview.${name}.rows`;
  const cells = tableCells(
    list.rows.map((row) => row.slice(1)),
    source,
    1,
  );
  const rows = list.rows.map((row, number) => [sampleCell(row[0], `${source}.${number}.0`, false), ...cells[number]]);
  return el(
    'section',
    { class: 'card wide' },
    el('h3', {}, title),
    el('p', {}, list.sentence),
    rows.length
      ? table(caption, ['Training point', ...list.head], rows, { class: name })
      : el('p', {}, 'None.'),
  );
}

function buildOverview() {
  const { overview } = content;
  const parts = [overview.suspects, overview.datamodel, overview.map];
  const nothing = overview.accuracy === null && !overview.figures.length && !parts.some(Boolean);
  byId('overview').append(
    ...[
      nothing ? el('p', {}, 'This report has no numbers of the whole.') : null,
      accuracyLine(overview),
      el(
        'div',
        { class: 'cards two' },
        overview.map ? mapCard(overview.map) : null,
        overview.figures.map(figureCard),
        samplesCard('datamodel', 'Without many samples', 'Training points whose absence would change a number most'),
        samplesCard('suspects', 'Suspected label errors', 'Training points whose label is suspected to be wrong'),
      ),
    ].filter(Boolean),
  );
}
