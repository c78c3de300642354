// The terms of a view, their sum, and the training points that raised and lowered the output most.

const MUCH = 10; // amplification from which contributions are said to cancel

function sourceOf(state) {
  return `points.${state.point}.explanations.${state.target}`;
}

function viewSource(state) {
  return `${sourceOf(state)}.views.${viewKey(state.layer, state.steps)}`;
}

function endNames(state) {
  const output = content.outputs.name;
  if (state.layer === ALL && state.steps === ALL) return [`Initial ${output}`, `Final ${output}`];
  if (state.layer === ALL) return [`Before ${stepsName(state.steps)}`, `After ${stepsName(state.steps)}`];
  return [null, `Part of ${layerName(state.layer)}, ${stepsName(state.steps)}`];
}

function endSources(state) {
  const source = sourceOf(state);
  if (state.layer === ALL && state.steps === ALL) return [`${source}.initial`, `${source}.network`];
  if (state.layer === ALL) return [`${source}.running.${state.steps}`, `${source}.running.${Number(state.steps) + 1}`];
  return [null, `${viewSource(state)}.total`];
}

function termName(term) {
  const points = term.countSource
    ? el(
        'span',
        { class: 'aside' },
        count(term.count, term.countSource),
        ` training ${noun(term.count)}`,
      )
    : null;
  const sentence = term.sentence ? el('span', { class: 'aside' }, term.sentence) : null;
  return [el('span', { class: 'term-name' }, term.name), points || sentence];
}

// Every term with a bar of its own, from the initial to the final output.
function termsTable(state, explanation) {
  const view = explanation.views[viewKey(state.layer, state.steps)];
  const terms = termsOf(view, viewSource(state));
  const sum = sumOf(explanation, state.layer, state.steps);
  const [startName, endName] = endNames(state);
  const [startSource, endSource] = endSources(state);
  const values = [...terms.map((term) => term.value), sum.end, ...(startName ? [sum.start] : [])];
  const scale = Math.max(...values.map(Math.abs));
  const decimals = decimalsFor(values);
  const row = (name, value, source, kind) =>
    el(
      'tr',
      { class: kind },
      el('th', { scope: 'row' }, name),
      el('td', {}, kind ? null : mark(value), quantity(value, source, { decimals, always: !kind })),
      el('td', {}, track(value, scale, kind ? { class: 'track both end' } : {})),
    );
  return scroller(
    'Terms of the output',
    el(
      'table',
      { class: 'bars terms' },
      el('caption', { class: 'visually-hidden' }, 'Every term of the output, and their sum'),
      el(
        'thead',
        {},
        el(
          'tr',
          {},
          ['Term', content.outputs.name, 'Lowered | raised'].map((text) => el('th', { scope: 'col' }, text)),
        ),
      ),
      el(
        'tbody',
        {},
        startName ? row(startName, sum.start, startSource, 'ends') : null,
        terms.map((term) => row(termName(term), term.value, term.source)),
        row(endName, sum.end, endSource, 'ends last'),
      ),
    ),
    state.layer === ALL
      ? null
      : el(
          'p',
          { class: 'aside' },
          'Moving statistics have no layers: their term belongs to all layers together, and is none of this layer.',
        ),
  );
}

// The sum as a line, computed here, and an error where it is not the stored output.
function sumLine(state, explanation) {
  const view = explanation.views[viewKey(state.layer, state.steps)];
  const terms = termsOf(view, viewSource(state));
  const sum = sumOf(explanation, state.layer, state.steps);
  const [startName, endName] = endNames(state);
  const part = (value, source, name, always) =>
    el('span', { class: 'part' }, exactQuantity(value, source, Boolean(always)), ' ', el('small', {}, name));
  const parts = terms.filter((term) => term.value !== 0).map((term) => part(term.value, term.source, term.name, true));
  if (startName) parts.unshift(part(sum.start, endSources(state)[0], startName));
  const result = exactQuantity(sum.sum, 'sum of the view', false);
  const line = el(
    'p',
    { class: 'sum', id: 'sum', 'data-agrees': String(sum.agrees) },
    parts.map((element) => [element, ' ']),
    el('span', { class: 'part result' }, '=\u00a0', result, ' ', el('small', {}, endName)),
  );
  if (sum.agrees) {
    return [line, el('p', { class: 'agrees' }, '✓ Computed here, exactly, and equal to the stored value.')];
  }
  const difference = sum.sum === sum.end ? sum.ofView - sum.stored : sum.sum - sum.end;
  return [
    line,
    el(
      'p',
      { class: 'disagrees', role: 'alert' },
      `✗ The terms do not add up to the stored value ${exactText(sum.end)}: `,
      `they differ by ${exactText(difference, true)}. ${DAMAGED}`,
    ),
  ];
}

// What it means that contributions are much larger than what they sum to.
function cancelNote(state, explanation) {
  if (!(explanation.amplification >= MUCH)) return null;
  return el(
    'p',
    { class: 'notice' },
    'Amplification ',
    plainNumber(explanation.amplification, `${sourceOf(state)}.amplification`, { decimals: 0 }),
    ': so many times as large are the contributions, step by step, as the changes that they sum to. The sum is exact, ',
    'but a single contribution is balanced by others and says little about its point: ',
    isClassifier() ? 'read sums by label, rank by the difference between two classes’ contributions, or ' : '',
    'ask for an influence, which says what would change.',
  );
}

function isUnpictured([number]) {
  return sampleOf(number) && !sampleOf(number).image;
}

// The text of a training sample, shaded where all layers and steps are shown: shares of words are those of the whole.
function passageRow(state, [number, share], columns) {
  const { words } = sampleOf(number);
  const { tokens } = content.points[state.point].explanations[state.target];
  const part = state.layer === ALL && state.steps === ALL && tokens ? tokens[number] : null;
  return el(
    'tr',
    { class: 'passage-row' },
    el(
      'td',
      { colspan: columns },
      passage(words, part, `Training text ${number}`),
      wordShares(words, part, share, `${sourceOf(state)}.tokens.${number}`, 'Shares of its words'),
    ),
  );
}

function sampleTable(state, view, side) {
  const lowers = side === 'lowered';
  const rows = view[side];
  const [restCount, restSum] = view[`rest_${side}`];
  const source = viewSource(state);
  const influence = [...view.raised, ...view.lowered].some((row) => row[2] !== null);
  const scale = Math.max(...[...view.raised, ...view.lowered].map((row) => Math.abs(row[1])), 0);
  const decimals = decimalsFor([...view.raised, ...view.lowered].map((row) => row[1]));
  const verb = lowers ? 'lowered' : 'raised';
  const title = `${lowers ? '▼' : '▲'} Training ${noun(2)} that ${verb} it most`;
  const name = (cell, value, element, row) =>
    el(
      'tr',
      {},
      el('th', { scope: 'row' }, cell),
      el('td', {}, element),
      el('td', { class: 'bar-cell' }, value === null ? null : sideTrack(value, scale)),
      influence
        ? el(
            'td',
            {},
            row && row[2] !== null ? plainNumber(row[2], `${source}.${side}.${row.index}.2`, { always: true }) : '',
          )
        : null,
    );
  return el(
    'section',
    { class: `card side-${verb}` },
    el('h4', {}, title),
    scroller(
      title,
      el(
        'table',
        { class: `samples ${IS_TEXT ? 'texts' : rows.some(isUnpictured) ? 'words' : ''}` },
        el('caption', { class: 'visually-hidden' }, title),
        el(
          'thead',
          {},
          el(
            'tr',
            {},
            [`Training ${noun(1)}`, 'Contribution', lowers ? 'Lowered' : 'Raised', ...(influence ? ['Influence'] : [])].map(
              (text) => el('th', { scope: 'col' }, text),
            ),
          ),
        ),
        el(
          'tbody',
          {},
          rows.map((row, index) => [
            name(
              sampleCell(row[0], `${source}.${side}.${index}.0`, true, false),
              row[1],
              quantity(row[1], `${source}.${side}.${index}.1`, { decimals }),
              Object.assign([...row], { index }),
            ),
            IS_TEXT ? passageRow(state, row, influence ? 4 : 3) : null,
          ]),
          el(
            'tr',
            { class: 'rest' },
            el(
              'th',
              { scope: 'row' },
              count(restCount, `${source}.rest_${side}.0`),
              ` other ${noun(restCount)} that ${verb} it`,
            ),
            el('td', {}, quantity(restSum, `${source}.rest_${side}.1`, { decimals })),
            el('td', { class: 'aside', colspan: influence ? 2 : 1 }, 'their sum'),
          ),
        ),
      ),
    ),
  );
}
