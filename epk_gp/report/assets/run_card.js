// What was run, and what the certificate says. Made when it is first shown.

function checkCard() {
  const { checked, wrong } = checkAll();
  if (!wrong.length) {
    return el(
      'section',
      { class: 'card' },
      el('h3', {}, 'Sums of this file'),
      el(
        'p',
        { class: 'agrees', id: 'all-sums' },
        `✓ All ${countText(checked)} sums were computed again here and equal the stored values.`,
      ),
    );
  }
  return el(
    'section',
    { class: 'card' },
    el('h3', {}, 'Sums of this file'),
    el(
      'p',
      { class: 'disagrees', id: 'all-sums' },
      `✗ ${countText(wrong.length)} of ${countText(checked)} sums do not equal the stored values. The first ones:`,
    ),
    el(
      'ul',
      {},
      wrong
        .slice(0, 10)
        .map((entry) =>
          el(
            'li',
            {},
            el('a', { href: linkTo({ view: 'prediction', ...entry }) }, [
              content.points[entry.point].name,
              ', ',
              chosenText(entry),
            ]),
          ),
        ),
    ),
  );
}

function certificateCard() {
  const { certified, sentences, rows } = content.certificate;
  return el(
    'section',
    { class: certified ? 'card good' : 'card bad', id: 'certificate' },
    el('h3', {}, certified ? '✓ Certified' : '✗ Not certified'),
    sentences.map((sentence) => el('p', {}, sentence)),
    rows.length
      ? table(
          'What was checked',
          ['Checked', 'Value', 'Limit'],
          rows.map((row) => row.map(String)),
        )
      : null,
  );
}

function buildRun() {
  byId('run').append(
    el(
      'div',
      { class: 'cards two' },
      certificateCard(),
      checkCard(),
      content.card.map(({ title, rows }) =>
        el(
          'section',
          { class: 'card' },
          el('h3', {}, title),
          el(
            'dl',
            { class: 'facts' },
            rows.map(([name, text]) => el('div', {}, el('dt', {}, name), el('dd', {}, String(text)))),
          ),
        ),
      ),
    ),
  );
}
