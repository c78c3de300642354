// Inputs of points: an image, a text, named values or a position in the plane, large or as a thumbnail.

const TEXT_OF_THUMBNAIL = 60;
const VALUES_OF_THUMBNAIL = 3;
const VALUES_AT_ONCE = 12; // rows of a table; the others can be opened

function labelName(label) {
  if (label === null || label === undefined) return '';
  return isClassifier() ? classNames()[label] || `class ${label}` : String(label);
}

function labelMark(label) {
  return el('span', { class: 'label' }, labelName(label));
}

// The target of the explained output, of a training sample of a regression.
function targetMark(target, source) {
  if (!target) return null;
  const output = Number(current.target);
  return [' ', el('span', { class: 'label' }, 'target ', plainNumber(target[output], `${source}.${output}`))];
}

function suspectMark(expected) {
  if (expected === null || expected === undefined) return null;
  return [' ', el('span', { class: 'suspected' }, `⚑ label suspected, ${labelName(expected)} expected`)];
}

function valueRows(input, source) {
  const decimals = decimalsOfColumn(input.values.map((entry) => entry[1]));
  return input.values.map(([name, value], row) => [
    name,
    plainNumber(value, `${source}.values.${row}.1`, { decimals }),
  ]);
}

function positionText(input, source) {
  const coordinate = (axis) => plainNumber(input.position[axis], `${source}.position.${axis}`, { decimals: 3 });
  return el('span', { class: 'position' }, '(', coordinate(0), ', ', coordinate(1), ')');
}

function largeInput(input, name, source) {
  const parts = input.words ? [passage(input.words, null, `Text of ${name}`)] : [];
  if (input.image) parts.push(el('img', { class: 'large', src: input.image, alt: `Input of ${name}` }));
  if (input.text !== undefined) parts.push(el('blockquote', { class: 'text', tabindex: 0 }, input.text));
  if (input.position) parts.push(el('p', { class: 'where' }, 'Position ', positionText(input, source)));
  return input.values ? [...parts, valueTables(valueRows(input, source), name)] : parts;
}

function valueTables(rows, name) {
  const part = (some, caption) => table(caption, ['Name', 'Value'], some, { class: 'values' });
  if (rows.length <= VALUES_AT_ONCE) return part(rows, `Values of ${name}`);
  const others = rows.slice(VALUES_AT_ONCE);
  return [
    part(rows.slice(0, VALUES_AT_ONCE), `First values of ${name}`),
    disclosure(
      [count(others.length, 'number of the other values'), others.length === 1 ? ' other value' : ' other values'],
      part(others, `Other values of ${name}`),
    ),
  ];
}

function shortened(text) {
  return text.length > TEXT_OF_THUMBNAIL ? `${text.slice(0, TEXT_OF_THUMBNAIL)}…` : text;
}

function thumbnail(input, source) {
  if (!input) return null;
  if (input.image) return el('img', { class: 'thumbnail', src: input.image, alt: '' });
  if (input.words) return el('span', { class: 'excerpt', dir: 'auto' }, shortened(input.words.join('').trim()));
  if (input.text !== undefined) return el('span', { class: 'excerpt', title: input.text }, shortened(input.text));
  if (input.position) return el('span', { class: 'excerpt' }, positionText(input, source));
  const rows = input.values.slice(0, VALUES_OF_THUMBNAIL);
  const more = input.values.length > rows.length ? ', …' : '';
  return el(
    'span',
    { class: 'excerpt', title: input.values.map(([name, value]) => `${name} ${value}`).join(', ') },
    rows.map(([name, value], row) => [
      row ? ', ' : '',
      `${name} `,
      plainNumber(value, `${source}.values.${row}.1`, { decimals: 2 }),
    ]),
    more,
  );
}

function sampleOf(number) {
  return content.samples.shown[String(number)];
}

// A training sample: thumbnail, number and label; of a text that stands beside it no excerpt.
function sampleCell(number, source, marksSuspects = true, excerpts = true) {
  const sample = sampleOf(number);
  return el(
    'span',
    { class: sample && (sample.image || sample.words) ? 'sample' : 'sample stacked' },
    sample && sample.words && !excerpts ? null : thumbnail(sample, `samples.shown.${number}`),
    el(
      'span',
      { class: 'sample-name' },
      el(
        'span',
        { class: 'sample-number' },
        '#',
        numberElement(String(number), number, source, `Training sample ${number}`),
      ),
      sample && sample.label !== null ? [' ', labelMark(sample.label)] : null,
      sample ? targetMark(sample.target, `samples.shown.${number}.target`) : null,
      sample && marksSuspects ? suspectMark(sample.suspected) : null,
    ),
  );
}
