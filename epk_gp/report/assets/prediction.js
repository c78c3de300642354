// One prediction: its input, its probabilities, what it adds up from, and over which steps, layers and labels.

function selectField(id, label, change) {
  return el(
    'span',
    { class: 'field' },
    el('label', { for: id }, label),
    el('select', { id, on: { change: (event) => change(event.target.value) } }),
  );
}

function chooseLayer(layer) {
  const together = current.steps === ALL || layer === ALL || holds(layer, current.steps);
  go(together ? { layer } : { layer, steps: ALL });
}

function chooseSteps(steps) {
  const together = current.layer === ALL || steps === ALL || holds(current.layer, steps);
  go(together ? { steps } : { steps, layer: ALL });
}

function holds(layer, steps) {
  return viewKey(layer, steps) in content.points[current.point].explanations[current.target].views;
}

// The controls are made once, so that they keep the focus while what is below them changes.
function buildControls() {
  const step = (id, offset, text, sign_) =>
    el(
      'button',
      {
        id,
        type: 'button',
        title: 'The left and right arrow keys do this too',
        'aria-keyshortcuts': offset < 0 ? 'ArrowLeft' : 'ArrowRight',
        on: { click: () => go({ point: neighbour(current, offset) }) },
      },
      offset < 0 ? el('span', { 'aria-hidden': 'true' }, sign_) : null,
      ` ${text} `,
      offset > 0 ? el('span', { 'aria-hidden': 'true' }, sign_) : null,
    );
  byId('explanation').append(
    el(
      'div',
      { class: 'controls', role: 'group', 'aria-label': 'What is shown' },
      el('span', { class: 'steppers' }, step('previous', -1, 'Previous', '‹'), step('next', 1, 'Next', '›')),
      selectField('class', isClassifier() ? 'Class' : 'Output', (target) => go({ target })),
      selectField('layer', 'Layer', chooseLayer),
      selectField('steps', 'Steps', chooseSteps),
    ),
    el('div', { id: 'notices', role: 'status' }),
    el('div', { id: 'shown' }),
  );
}

function setOptions(id, options, chosen) {
  const select = byId(id);
  select.replaceChildren(...options.map(([value, name]) => el('option', { value, selected: value === chosen }, name)));
  select.value = chosen;
}

function roleText(point, target) {
  const roles = [target === point.predicted && 'predicted', target === point.label && 'label'].filter(Boolean);
  return isClassifier() && roles.length ? ` (${roles.join(', ')})` : '';
}

function showControls(state) {
  const point = content.points[state.point];
  setOptions(
    'class',
    Object.keys(point.explanations).map((target) => [
      target,
      classNames()[Number(target)] + roleText(point, Number(target)),
    ]),
    state.target,
  );
  setOptions(
    'layer',
    [[ALL, 'all layers'], ...content.layers.map((name, number) => [String(number), name])],
    state.layer,
  );
  setOptions(
    'steps',
    [[ALL, 'all steps'], ...content.ranges.map((range, number) => [String(number), stepsName(number)])],
    state.steps,
  );
  for (const [id, offset] of [
    ['previous', -1],
    ['next', 1],
  ])
    byId(id).disabled = neighbour(state, offset) === undefined;
}

function headline(state, point) {
  const wrong = isWrong(point);
  return el(
    'div',
    { class: 'headline' },
    el('h3', { id: 'point-title' }, point.name),
    isClassifier()
      ? el(
          'p',
          {},
          'the network predicts ',
          el('strong', {}, labelName(point.predicted)),
          point.label === null
            ? null
            : [
                ', label ',
                el('strong', {}, labelName(point.label)),
                ' ',
                el('span', { class: wrong ? 'wrong' : 'right' }, wrong ? '✗ wrong' : '✓ right'),
              ],
        )
      : content.outputs.are_asked
        ? changeLine(state, point)
        : valueLine(point, Number(state.target), `points.${state.point}.values`),
  );
}

// The number that was asked for, before and after training.
function changeLine(state, point) {
  const { initial, network } = point.explanations[state.target];
  const number = (value, end) => quantity(value, `${sourceOf(state)}.${end}`, { always: false });
  return el(
    'p',
    {},
    `${classNames()[Number(state.target)]}: `,
    number(initial, 'initial'),
    ' before training, ',
    el('strong', {}, number(network, 'network')),
    ' after',
  );
}

function inputCard(state, point) {
  if (IS_TEXT) return textCard(state, point);
  const parts = largeInput(point.input, point.name, `points.${state.point}.input`);
  if (point.input.position) parts.unshift(planeOf(state, point));
  return card('Input', { class: 'card input-card' }, parts);
}

// The words of the question, by how much training changed the log-probability of each, where that was asked for.
function textCard(state, point) {
  const { initial, network, words: part, tokens } = point.explanations[state.target];
  const { words } = point.input;
  const legend = (kind, verb) => [' ', el('span', { class: `word ${kind}` }, `${verb} it`)];
  return card(
    'Text',
    { class: 'card input-card text-card' },
    passage(words, part, `Text of ${point.name}`),
    part || tokens
      ? el('p', { class: 'aside legend' }, 'Shaded words', legend('raises', 'raised'), legend('lowers', 'lowered'))
      : null,
    wordShares(words, part, network - initial, `${sourceOf(state)}.words`, 'What training changed, by words'),
  );
}

function shareCards(state, view) {
  const source = viewSource(state);
  const cards = [];
  if (!sharesAgree(view)) {
    cards.push(
      el(
        'p',
        { class: 'disagrees', role: 'alert' },
        `✗ The shares by layer, label or steps are not shares of one sum. ${DAMAGED}`,
      ),
    );
  }
  if (view.layers) {
    cards.push(
      card(
        'By layer',
        {},
        signedBars(
          'Contributions of training points by layer',
          ['Layer', 'Contribution', 'Lowered | raised'],
          view.layers.map((value, number) => ({
            value,
            source: `${source}.layers.${number}`,
            name: el(
              'a',
              {
                href: linkTo(
                  holds(String(number), state.steps)
                    ? { layer: String(number) }
                    : { layer: String(number), steps: ALL },
                ),
                'data-key': `layer ${number}`,
              },
              content.layers[number],
            ),
          })),
        ),
      ),
    );
  }
  if (view.ranges) {
    cards.push(
      card(
        'By steps',
        {},
        signedBars(
          'Contributions of training points by range of steps',
          ['Steps', 'Contribution', 'Lowered | raised'],
          view.ranges.map((value, number) => ({
            value,
            source: `${source}.ranges.${number}`,
            name: el('span', { class: 'nowrap' }, stepsName(number)),
          })),
        ),
      ),
    );
  }
  if (view.labels) {
    cards.push(
      card(
        'By label of the training points',
        {},
        signedBars(
          'Contributions of training points by their label',
          ['Label', 'Contribution', 'Lowered | raised'],
          view.labels.map((value, number) => ({
            value,
            source: `${source}.labels.${number}`,
            name: labelName(number),
          })),
        ),
      ),
    );
  }
  return cards;
}

function chosenText(state) {
  const target = isClassifier()
    ? `${content.outputs.name} of ${classNames()[Number(state.target)]}`
    : classNames()[Number(state.target)];
  return `${target}, ${layerName(state.layer)}, ${stepsName(state.steps)}`;
}

function showPrediction(state) {
  const point = content.points[state.point];
  const explanation = point.explanations[state.target];
  const view = explanation.views[viewKey(state.layer, state.steps)];
  const shown = byId('shown');
  showControls(state);
  const notices = state.notices.map((text) => el('p', { class: 'notice' }, text));
  if (!content.certificate.certified) {
    notices.unshift(
      el(
        'p',
        { class: 'notice bad' },
        '✗ This report is not certified. ',
        el('a', { href: linkTo({ view: 'run' }) }, 'What that means'),
      ),
    );
  }
  byId('notices').replaceChildren(...notices);
  const chart = el('div', { class: 'chart-holder' });
  refill(
    shown,
    headline(state, point),
    el(
      'div',
      { class: 'cards three' },
      inputCard(state, point),
      probabilityCard(state, point),
      valueCard(state, point),
      scoreCard(state, point),
    ),
    el('h3', { class: 'part-title' }, 'Why: ', el('span', {}, chosenText(state))),
    card(
      'Everything adds up',
      {},
      termsTable(state, explanation),
      sumLine(state, explanation),
      cancelNote(state, explanation),
    ),
    el('div', { class: 'cards butterfly' }, sampleTable(state, view, 'lowered'), sampleTable(state, view, 'raised')),
    card(
      state.layer === ALL ? 'Over the steps of training' : 'Over the steps of training, all layers together',
      {},
      chart,
      disclosure('Table of the running sum', stepsTable(state, explanation)),
    ),
    el('div', { class: 'cards shares' }, shareCards(state, view)),
  );
  drawChart(state, explanation, chart);
}

function drawChart(state, explanation, holder) {
  holder.replaceChildren(stepsChart(state, explanation, Math.max(280, Math.floor(holder.clientWidth) || 640)));
}

function redraw() {
  markScrollers();
  const holder = document.querySelector('.chart-holder');
  if (holder) drawChart(current, content.points[current.point].explanations[current.target], holder);
}
