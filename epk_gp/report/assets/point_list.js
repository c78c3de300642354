// The list of test points, with search and sorting. Arrow keys move in it; only a part of a long list is made.

const ROWS_AT_ONCE = 40;
let rowsMade = ROWS_AT_ONCE;

// What is searched, in small letters.
function searchedText(point) {
  const named = [point.name, ...(IS_TEXT ? [point.input.words.join('')] : [])];
  if (isClassifier()) {
    named.push(`label ${labelName(point.label)}`, `predicted ${labelName(point.predicted)}`);
    if (point.label !== null) named.push(isWrong(point) ? 'wrong' : 'right');
  }
  return named.join(', ').toLowerCase();
}

// Numbers of the points that have the words as they stand; where there are none, of those that have words beginning so.
function foundPoints(query) {
  const texts = content.points.map(searchedText);
  const numbers = [...texts.keys()];
  const phrase = query.trim().toLowerCase().replace(/\s+/g, ' ');
  const found = numbers.filter((number) => texts[number].includes(phrase));
  if (found.length) return found;
  const words = phrase.split(' ');
  return numbers.filter((number) => words.every((word) => ` ${texts[number]}`.includes(` ${word}`)));
}

function sortings() {
  const named = [
    ['', 'order of the report', () => 0],
    ['name', 'name', (point) => point.name],
  ];
  if (isClassifier()) {
    named.push(
      ['label', 'label', (point) => (point.label === null ? -1 : point.label)],
      ['predicted', 'predicted class', (point) => point.predicted],
      ['wrong', 'wrong first', (point) => (isWrong(point) ? 0 : 1)],
    );
  }
  const scores = [...new Set(content.points.flatMap((point) => point.scores.map((score) => score[0])))];
  for (const name of scores) {
    named.push([
      `score ${name}`,
      `${name}, highest first`,
      (point) => {
        const score = point.scores.find((entry) => entry[0] === name);
        return score ? -score[1] : Infinity;
      },
    ]);
  }
  return named;
}

function compare(a, b) {
  return typeof a === 'string' ? a.localeCompare(b, 'en', { numeric: true }) : a - b;
}

// Numbers of the points that the search leaves, in the chosen order.
function listedPoints(state) {
  const numbers = foundPoints(state.find);
  const sorting = sortings().find((entry) => entry[0] === state.sort) || sortings()[0];
  const value = (number) => sorting[2](content.points[number]);
  numbers.sort((a, b) => compare(value(a), value(b)) || a - b);
  return state.down ? numbers.reverse() : numbers;
}

function pointRow(number, state) {
  const point = content.points[number];
  const wrong = isWrong(point);
  const score = state.sort.startsWith('score ')
    ? point.scores.findIndex((entry) => `score ${entry[0]}` === state.sort)
    : -1;
  const isCurrent = number === state.point;
  return el(
    'li',
    {},
    el(
      'a',
      {
        href: linkTo({ point: number }),
        'data-key': `point ${number}`,
        'data-point': number,
        'aria-current': isCurrent ? 'true' : null,
        tabindex: -1,
      },
      point.input.image ? thumbnail(point.input, `points.${number}.input`) : null,
      el(
        'span',
        { class: 'point-text' },
        el('span', { class: 'point-name' }, point.name),
        IS_TEXT ? thumbnail(point.input) : null,
        isClassifier()
          ? el(
              'span',
              { class: 'aside' },
              point.label === null
                ? `predicted ${labelName(point.predicted)}`
                : wrong
                  ? [
                      labelName(point.label),
                      ' ',
                      hidden('predicted as'),
                      el('span', { 'aria-hidden': 'true' }, '→'),
                      ' ',
                      labelName(point.predicted),
                    ]
                  : labelName(point.label),
            )
          : null,
      ),
      wrong ? el('span', { class: 'wrong' }, '✗ wrong') : null,
      score >= 0 ? plainNumber(point.scores[score][1], `points.${number}.scores.${score}.1`, { decimals: 3 }) : null,
    ),
  );
}

function moveInList(event) {
  const links = [...byId('points').querySelectorAll('a')];
  const at = links.indexOf(document.activeElement);
  const targets = {
    ArrowDown: at + 1,
    ArrowUp: at - 1,
    Home: 0,
    End: links.length - 1,
    PageDown: at + 10,
    PageUp: at - 10,
  };
  if (at < 0 || !(event.key in targets)) return;
  event.preventDefault();
  const next = links[Math.max(0, Math.min(links.length - 1, targets[event.key]))];
  links.forEach((link) => {
    link.tabIndex = link === next ? 0 : -1;
  });
  next.focus();
}

function changeList(changes) {
  rowsMade = ROWS_AT_ONCE;
  window.history.replaceState(null, '', linkTo(changes));
  shownFragment = window.location.hash;
  current = stateOf(shownFragment);
  showList(current);
  announce(byId('matches').textContent);
}

// The controls are made once, so that they keep the focus while the list below them changes.
function buildChooser() {
  const options = sortings().map(([value, name]) => el('option', { value }, name));
  const narrow = window.matchMedia('(max-width: 60rem)').matches;
  byId('chooser').append(
    el(
      'details',
      { class: 'chooser-body', open: !narrow },
      el('summary', {}, el('h3', {}, `Test ${noun(2)}`)),
      el(
        'div',
        { class: 'fields' },
        el('label', { for: 'find' }, 'Search'),
        el('input', {
          id: 'find',
          type: 'search',
          autocomplete: 'off',
          placeholder: isClassifier() ? 'name, label, wrong …' : IS_TEXT ? 'words' : 'name',
          on: { input: (event) => changeList({ find: event.target.value }) },
        }),
        el('label', { for: 'sort' }, 'Sort by'),
        el(
          'span',
          { class: 'sorting' },
          el('select', { id: 'sort', on: { change: (event) => changeList({ sort: event.target.value }) } }, options),
          el(
            'button',
            {
              id: 'down',
              type: 'button',
              'aria-pressed': 'false',
              title: 'Turn the order round',
              on: { click: () => changeList({ down: !current.down }) },
            },
            el('span', { 'aria-hidden': 'true' }, '⇅'),
            hidden('Turn the order round'),
          ),
        ),
      ),
      el('p', { id: 'matches', class: 'aside' }),
      el('ol', { id: 'points', on: { keydown: moveInList } }),
      el('button', { id: 'more', type: 'button', on: { click: showMore } }, 'Show more'),
    ),
  );
}

function showMore() {
  const first = rowsMade;
  rowsMade += ROWS_AT_ONCE;
  showList(current);
  byId('points').querySelectorAll('a')[first].focus();
}

function showList(state) {
  const numbers = listedPoints(state);
  const at = numbers.indexOf(state.point);
  if (at >= rowsMade) rowsMade = at + 1;
  byId('matches').textContent =
    numbers.length === content.points.length
      ? `${countText(numbers.length)} explained test ${noun(numbers.length)}`
      : `${countText(numbers.length)} of ${countText(content.points.length)} test ${noun(2)}`;
  for (const [id, value] of [
    ['find', state.find],
    ['sort', state.sort],
  ]) {
    if (byId(id).value !== value) byId(id).value = value;
  }
  byId('down').setAttribute('aria-pressed', String(state.down));
  const made = numbers.slice(0, rowsMade);
  refill(
    byId('points'),
    made.map((number) => pointRow(number, state)),
  );
  byId('more').hidden = made.length === numbers.length;
  const links = [...byId('points').querySelectorAll('a')];
  const entry =
    links.find((link) => link.contains(document.activeElement)) || links.find((link) => link.ariaCurrent) || links[0];
  if (entry) entry.tabIndex = 0;
}

// The point before or after the current one, in the order of the list.
function neighbour(state, offset) {
  const numbers = listedPoints(state);
  const at = numbers.indexOf(state.point);
  return numbers[at < 0 ? 0 : at + offset];
}
