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

function suspectsCard(suspects) {
  const source = 'overview.suspects.rows';
  const cells = tableCells(
    suspects.rows.map((row) => row.slice(1)),
    source,
    1,
  );
  const rows = suspects.rows.map((row, number) => [sampleCell(row[0], `${source}.${number}.0`, false), ...cells[number]]);
  return el(
    'section',
    { class: 'card wide' },
    el('h3', {}, 'Suspected label errors'),
    el('p', {}, suspects.sentence),
    rows.length
      ? table('Training points whose label is suspected to be wrong', ['Training point', ...suspects.head], rows, {
          class: 'suspects',
        })
      : el('p', {}, 'None.'),
  );
}

function buildOverview() {
  const { overview } = content;
  const nothing = overview.accuracy === null && !overview.figures.length && !overview.suspects && !overview.map;
  byId('overview').append(
    ...[
      nothing ? el('p', {}, 'This report has no numbers of the whole.') : null,
      accuracyLine(overview),
      el(
        'div',
        { class: 'cards two' },
        overview.map ? mapCard(overview.map) : null,
        overview.figures.map(figureCard),
        overview.suspects ? suspectsCard(overview.suspects) : null,
      ),
    ].filter(Boolean),
  );
}
