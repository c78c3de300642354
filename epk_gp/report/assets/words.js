// Texts by their words, shaded by what belongs to each: blue raised, orange and dashed lowered.

const DARKEST = 45; // percent of the colour behind a word, so that the word can be read
const IS_TEXT = content.points.some((point) => point.input.words);
const SIGNS = { '\n': '↵\n', '\t': '⇥\t', '': '∅' };

// What points are called.
function noun(number) {
  return IS_TEXT ? plural(number, 'text', 'texts') : plural(number, 'point', 'points');
}

// Line breaks and tabs with a sign; what cannot be seen, or would turn the direction of writing, by its number.
function visible(word) {
  if (!word) return SIGNS[word];
  return word.replace(
    /[\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\ufeff]/g,
    (sign_) => SIGNS[sign_] || `\\u${sign_.charCodeAt(0).toString(16).padStart(4, '0')}`,
  );
}

// A word on its own, in a table: with spaces that can be seen.
function wordName(word) {
  return el('span', { class: 'word-name', dir: 'auto' }, visible(word).replace(/ /g, '␣').replace(/\s/g, ''));
}

function wordElement(word, share, scale) {
  const strength = share ? (DARKEST * Math.abs(share)) / scale : 0;
  const kinds = ['word', !word && 'empty', strength && (share < 0 ? 'lowers' : 'raises')];
  return el(
    'span',
    {
      class: kinds.filter(Boolean).join(' '),
      style: strength ? { '--strength': `${strength.toFixed(1)}%` } : null,
      title: typeof share === 'number' ? exactText(share, true) : null,
      'data-peak': Boolean(share) && Math.abs(share) === scale,
    },
    visible(word),
  );
}

// A text. `part` has the share of each word, or null for one without, and what they leave of the whole.
function passage(words, part, name) {
  const shares = part ? part.shares : [];
  const scale = Math.max(0, ...shares.map(Math.abs));
  const spans = words.map((word, k) => wordElement(word, shares[k], scale));
  return scroller(name, el('p', { class: 'passage', dir: 'auto' }, spans));
}

// The words with the largest shares, and their sum, made when they are asked for.
function wordShares(words, part, whole, source, summary) {
  if (!part) return null;
  if (!wordsAgree(part, whole)) {
    return el('p', { class: 'disagrees', role: 'alert' }, `✗ The shares of the words do not add up. ${DAMAGED}`);
  }
  const details = disclosure(summary);
  const rows = words.map((word, k) => ({
    name: wordName(word),
    value: part.shares[k],
    source: `${source}.shares.${k}`,
  }));
  const rest = { name: 'rounding, words not shown', value: part.rest, source: `${source}.rest` };
  details.addEventListener('toggle', () => {
    if (details.open && details.children.length === 1)
      details.append(
        signedBars(summary, ['Word', 'Share', 'Lowered | raised'], [...rows.filter((row) => row.value), rest]),
        el('p', { class: 'agrees' }, '✓ Added here, exactly, and equal to the whole.'),
      );
  });
  return details;
}

// A long text shows the word with the largest share first.
function showPeaks() {
  for (const peak of document.querySelectorAll('#shown [data-peak]')) {
    const box = peak.closest('.scroller');
    box.scrollTop = peak.offsetTop - box.clientHeight / 2;
  }
}
