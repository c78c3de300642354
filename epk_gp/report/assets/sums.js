// Sums in whole multiples of the quantum. They are exact, so two sums agree or they do not: there is no tolerance.

const DAMAGED = 'The file was changed or is damaged; do not rely on it.';

function total(values) {
  let sum = 0;
  for (const value of values) {
    sum += value;
    if (!Number.isSafeInteger(value) || !Number.isSafeInteger(sum)) return NaN; // not exact: agrees with nothing
  }
  return sum;
}

function viewKey(layer, steps) {
  return `${layer}|${steps}`;
}

const OTHER_TERMS = [
  ['decay', 'Weight decay', 'What shrinking the weights at each step did.'],
  ['statistics', 'Moving statistics', 'What the moving averages of normalisation layers did.'],
  ['unexplained', 'Unexplained', 'What the recorded steps did beyond the update rule on the training data.'],
  ['sources', 'Other sources', 'What rows that are no training points, and an optimizer that was loaded, added.'],
  content.certificate.certified
    ? ['rounding', 'Rounding', 'What writing each term as a whole multiple of the quantum left out.']
    : ['rounding', 'Missing', 'What all terms miss of the output: rounding, and what is not certified.'],
];

const SHARES = ['labels', 'layers', 'ranges'];

// The terms of a view in the order in which they are added.
function termsOf(view, source) {
  const shown = (side) => view[side].map((row) => row[1]);
  return [
    {
      key: 'raised',
      name: 'Raised it most',
      values: shown('raised'),
      count: view.raised.length,
      countSource: `count of ${source}.raised`,
      source: `sum of ${source}.raised`,
    },
    {
      key: 'rest_raised',
      name: `Other ${noun(2)} that raised it`,
      values: [view.rest_raised[1]],
      count: view.rest_raised[0],
      countSource: `${source}.rest_raised.0`,
      source: `${source}.rest_raised.1`,
    },
    {
      key: 'lowered',
      name: 'Lowered it most',
      values: shown('lowered'),
      count: view.lowered.length,
      countSource: `count of ${source}.lowered`,
      source: `sum of ${source}.lowered`,
    },
    {
      key: 'rest_lowered',
      name: `Other ${noun(2)} that lowered it`,
      values: [view.rest_lowered[1]],
      count: view.rest_lowered[0],
      countSource: `${source}.rest_lowered.0`,
      source: `${source}.rest_lowered.1`,
    },
    ...OTHER_TERMS.filter(([key]) => key in view).map(([key, name, sentence]) => ({
      key,
      name,
      sentence,
      values: [view[key]],
      source: `${source}.${key}`,
    })),
  ].map((term) => ({ ...term, value: total(term.values) }));
}

// What a view adds up to: from where, to where, and whether the computed sum is the stored one.
function sumOf(explanation, layer, steps) {
  const view = explanation.views[viewKey(layer, steps)];
  const terms = termsOf(view, '');
  let start = 0;
  let end = view.total;
  if (layer === '*' && steps === '*') [start, end] = [explanation.initial, explanation.network];
  if (layer === '*' && steps !== '*') {
    [start, end] = [explanation.running[Number(steps)], explanation.running[Number(steps) + 1]];
  }
  const sum = total([start, ...terms.map((term) => term.value)]);
  const ofView = total(terms.map((term) => term.value));
  return { start, end, sum, ofView, stored: view.total, agrees: sum === end && ofView === view.total };
}

// The terms of all training samples of a view together.
function samplesSum(view) {
  const rows = [...view.raised, ...view.lowered].map((row) => row[1]);
  return total([...rows, view.rest_raised[1], view.rest_lowered[1]]);
}

// Whether the shares by label, by layer and by steps that a view has are shares of the same sum.
function sharesAgree(view) {
  return SHARES.every((part) => !view[part] || total(view[part]) === samplesSum(view));
}

function runningAgrees(explanation) {
  const { running, initial, network } = explanation;
  return running[0] === initial && running[running.length - 1] === network;
}

// Whether the shares of words, with what they leave, are the whole.
function wordsAgree(part, whole) {
  return total([...part.shares.map(Number), part.rest]) === whole;
}

// Words of the question, and of training texts, with what each of them adds up to.
function partsOf({ initial, network, words, tokens, views }) {
  const { raised, lowered } = views['*|*'];
  const texts = [...raised, ...lowered].filter(([index]) => tokens && tokens[index]);
  return [...(words ? [[words, network - initial]] : []), ...texts.map(([index, share]) => [tokens[index], share])];
}

// Compute every sum of the report, and return how many there are and which do not agree.
function checkAll() {
  let checked = 0;
  const wrong = [];
  content.points.forEach((point, number) => {
    for (const [target, explanation] of Object.entries(point.explanations)) {
      checked += 1;
      const parts = partsOf(explanation);
      checked += parts.length;
      if (!runningAgrees(explanation) || !parts.every(([part, whole]) => wordsAgree(part, whole)))
        wrong.push({ point: number, target, layer: '*', steps: '*' });
      for (const key of Object.keys(explanation.views)) {
        const [layer, steps] = key.split('|');
        checked += 1;
        if (!sumOf(explanation, layer, steps).agrees || !sharesAgree(explanation.views[key]))
          wrong.push({ point: number, target, layer, steps });
      }
    }
  });
  return { checked, wrong };
}
