// What is shown is what the fragment of the address says: every view has a link, and back and forward work.

const VIEWS = ['prediction', 'overview', 'run'];
const ALL = '*';

function parametersOf(fragment) {
  const parameters = {};
  for (const part of fragment.replace(/^#/, '').split('&')) {
    const [name, value] = part.split('=');
    if (value === undefined) continue;
    try {
      parameters[name] = decodeURIComponent(value);
    } catch (error) {
      parameters[name] = value;
    }
  }
  return parameters;
}

function classNames() {
  return content.outputs.classes;
}

function isClassifier() {
  return content.points.some((point) => point.label !== null || point.probabilities !== null);
}

function isWrong(point) {
  return isClassifier() && point.label !== null && point.label !== point.predicted;
}

function layerName(layer) {
  return layer === ALL ? 'all layers' : `layer ${content.layers[Number(layer)]}`;
}

function stepsName(steps) {
  if (steps === ALL) return 'all steps';
  const [first, last] = content.ranges[Number(steps)];
  return last - first === 1 ? `step ${first}` : `steps ${first}–${last - 1}`;
}

function entryOf(text, number) {
  return /^\d+$/.test(text) && Number(text) < number;
}

// The view that the fragment names. What the report does not hold is replaced, and the notices say by what.
function stateOf(fragment) {
  const given = parametersOf(fragment);
  const notices = [];
  const state = { view: VIEWS.includes(given.view) ? given.view : 'prediction', notices };
  state.point = 0;
  if (given.point !== undefined) {
    if (entryOf(given.point, content.points.length)) state.point = Number(given.point);
    else notices.push(`This report has no test point ${given.point}: the first one is shown.`);
  }
  const point = content.points[state.point];
  const explained = Object.keys(point.explanations);
  state.target = explained.includes(String(point.predicted)) ? String(point.predicted) : explained[0];
  state.chosenTarget = given.class !== undefined;
  if (state.chosenTarget) {
    if (explained.includes(given.class)) state.target = given.class;
    else {
      const name = classNames()[Number(given.class)] || given.class;
      notices.push(
        `This report does not explain ${name} at this point: ${classNames()[Number(state.target)]} is shown.`,
      );
    }
  }
  state.layer = choiceOf(given.layer, content.layers.length, 'layer', notices);
  state.steps = choiceOf(given.steps, content.ranges.length, 'range of steps', notices);
  const views = point.explanations[state.target].views;
  if (!(viewKey(state.layer, state.steps) in views)) {
    notices.push(
      `This report does not hold ${layerName(state.layer)} with ${stepsName(state.steps)} alone: all steps are shown.`,
    );
    state.steps = ALL;
  }
  if (!(viewKey(state.layer, state.steps) in views)) state.layer = ALL;
  state.find = given.find || '';
  state.sort = given.sort || '';
  state.down = given.down === '1';
  return state;
}

function choiceOf(text, number, kind, notices) {
  if (text === undefined || text === ALL) return ALL;
  if (entryOf(text, number)) return String(Number(text));
  notices.push(`This report has no ${kind} ${text}: all are shown.`);
  return ALL;
}

function fragmentOf(state) {
  const parts = [];
  if (state.view !== 'prediction') parts.push(`view=${state.view}`);
  parts.push(`point=${state.point}`);
  if (state.chosenTarget) parts.push(`class=${state.target}`);
  if (state.layer !== ALL) parts.push(`layer=${state.layer}`);
  if (state.steps !== ALL) parts.push(`steps=${state.steps}`);
  if (state.find) parts.push(`find=${encodeURIComponent(state.find)}`);
  if (state.sort) parts.push(`sort=${encodeURIComponent(state.sort)}`);
  if (state.down) parts.push('down=1');
  return `#${parts.join('&')}`;
}

let current = null;

// The address of the current view with some choices changed.
function linkTo(changes) {
  const state = { ...current, ...changes };
  if ('target' in changes) state.chosenTarget = true;
  return fragmentOf(state);
}

// Show what a fragment says, as a new entry of the browser's history.
function openFragment(fragment) {
  if (fragment === window.location.hash) return;
  window.history.pushState(null, '', fragment);
  show();
}

function go(changes) {
  openFragment(linkTo(changes));
}
