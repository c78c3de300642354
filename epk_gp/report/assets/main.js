// What is shown follows the address. Views other than the current one are made when they are needed.

const THEME_KEY = 'epk-gp-report-theme';
const BUILD = { overview: buildOverview, run: buildRun };
const built = new Set();
let shownFragment = null;

function ensure(view) {
  if (!(view in BUILD) || built.has(view)) return;
  built.add(view);
  BUILD[view]();
}

function show() {
  const before = current;
  shownFragment = window.location.hash;
  current = stateOf(shownFragment);
  for (const view of VIEWS) byId(view).hidden = view !== current.view;
  for (const link of document.querySelectorAll('nav a')) {
    link.setAttribute('href', linkTo({ view: link.dataset.view }));
    if (link.dataset.view === current.view) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  byId('badge').setAttribute('href', linkTo({ view: 'run' }));
  ensure(current.view);
  if (current.view === 'prediction') {
    showList(current);
    showPrediction(current);
  }
  const point = content.points[current.point];
  const names = {
    prediction: `${point.name}, ${chosenText(current)}`,
    overview: 'Overview',
    run: 'Run and certificate',
  };
  document.title = `${current.view === 'prediction' ? point.name : names[current.view]} · ${content.title}`;
  markScrollers();
  showPeaks();
  if (before && before.view !== current.view) beginView();
  if (before) announce(`${names[current.view]}. ${current.view === 'prediction' ? spokenSum() : ''}`);
}

// Another view begins at its top, and the focus is not left in what is hidden.
function beginView() {
  window.scrollTo(0, 0);
  if (!document.activeElement.closest(`header, #${current.view}`)) byId('main').focus();
}

// Back, forward, and an address that was written by hand.
function followAddress() {
  if (window.location.hash !== shownFragment) show();
}

// Links inside the report, unless they are to be opened elsewhere.
function followLink(event) {
  const link = event.target.closest('a[href^="#"]');
  if (!link || event.defaultPrevented || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  openFragment(link.getAttribute('href'));
}

// The left and right arrow keys show the point before or after, unless they mean something where the focus is.
const OWN_ARROWS = 'input, select, textarea, [contenteditable], [role="application"], .scroller[tabindex]';

function movePoint(event) {
  const offset = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!offset || current.view !== 'prediction' || event.defaultPrevented) return;
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.altKey || event.target.closest(OWN_ARROWS)) return;
  const point = neighbour(current, offset);
  if (point === undefined) return;
  event.preventDefault();
  const focused = document.activeElement;
  const isListed = byId('points').contains(focused);
  go({ point });
  if (isListed) byId('points').querySelector('[aria-current]').focus();
  else if (focused !== document.body && !focused.isConnected && document.activeElement === document.body)
    byId('main').focus({ preventScroll: true });
}

function spokenSum() {
  const sum = sumOf(content.points[current.point].explanations[current.target], current.layer, current.steps);
  return `Sum ${exactText(sum.sum)}, ${sum.agrees ? 'equal to the stored value' : 'not equal to the stored value'}.`;
}

function rebuild() {
  for (const view of built)
    byId(view)
      .querySelectorAll(':scope > :not(h2)')
      .forEach((element) => element.remove());
  built.clear();
  show();
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === 'dark' : window.matchMedia('(prefers-color-scheme: dark)').matches;
}

function nameTheme() {
  byId('theme').textContent = isDark() ? 'Light theme' : 'Dark theme';
}

// The browser's memory may be closed to files: the theme then lasts as long as the page.
function remembered(value) {
  try {
    if (value === undefined) return window.localStorage.getItem(THEME_KEY);
    window.localStorage.setItem(THEME_KEY, value);
  } catch (error) {
    return null;
  }
  return value;
}

function buildSwitches() {
  const theme = remembered();
  if (theme === 'dark' || theme === 'light') document.documentElement.dataset.theme = theme;
  nameTheme();
  byId('theme').addEventListener('click', () => {
    document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
    remembered(document.documentElement.dataset.theme);
    nameTheme();
  });
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', nameTheme);
  byId('digits').addEventListener('click', (event) => {
    setAllDigits(!showsAllDigits);
    event.target.setAttribute('aria-pressed', String(showsAllDigits));
    rebuild();
  });
}

// On paper all parts of the report are there, and the tables behind figures are open; long inputs stay short.
let openedForPrint = [];

function prepareForPrint() {
  ['overview', 'run'].forEach(ensure);
  if (current.view !== 'prediction') showPrediction(current);
  for (const details of document.querySelectorAll('main details:not([open], .input-card details)')) {
    openedForPrint.push(details);
    details.open = true;
    details.dispatchEvent(new Event('toggle')); // the browser's own event comes too late for the paper
  }
}

function tidyAfterPrint() {
  for (const details of openedForPrint) details.open = false;
  openedForPrint = [];
}

function start() {
  const { certified } = content.certificate;
  byId('badge').textContent = certified ? '✓ Certified' : '✗ Not certified';
  byId('badge').classList.add(certified ? 'good' : 'bad');
  byId('quantum').textContent = powerText(-DIGITS);
  buildSwitches();
  buildChooser();
  buildControls();
  document.querySelector('.skip').addEventListener('click', (event) => {
    event.preventDefault();
    byId('main').focus();
  });
  document.addEventListener('click', followLink);
  document.addEventListener('keydown', movePoint);
  for (const event of ['popstate', 'hashchange']) window.addEventListener(event, followAddress);
  window.addEventListener('beforeprint', prepareForPrint);
  window.addEventListener('afterprint', tidyAfterPrint);
  let waiting = 0;
  window.addEventListener('resize', () => {
    window.cancelAnimationFrame(waiting);
    waiting = window.requestAnimationFrame(redraw);
  });
  show();
}

start();
