// Numbers as people read them. What is shown carries its exact value, and the place in the content where it is from.

const THIN = '\u202f'; // a narrow space that does not break
const MINUS = '\u2212';
const TIMES = '\u00d7';
const SUPERSCRIPTS = '⁰¹²³⁴⁵⁶⁷⁸⁹';

const content = JSON.parse(byId('content').textContent);
const DIGITS = Math.round(-Math.log10(content.quantum)); // decimals of a multiple of the quantum

let showsAllDigits = false;

function setAllDigits(value) {
  showsAllDigits = value;
}

// Groups of three: before the point from the right where there are five digits or more, behind it from the left.
function grouped(whole, decimals) {
  const left = whole.length > 4 ? whole.replace(/\B(?=(\d{3})+$)/g, THIN) : whole;
  const right = decimals.length > 4 ? decimals.replace(/(\d{3})(?=\d)/g, `$1${THIN}`) : decimals;
  return right ? `${left}.${right}` : left;
}

// The text of an integer number of units of 10^-decimals, without its sign.
function unsigned(units, decimals) {
  const text = String(Math.abs(units)).padStart(decimals + 1, '0');
  return grouped(text.slice(0, text.length - decimals), text.slice(text.length - decimals));
}

function sign(value, always) {
  if (value < 0) return MINUS;
  return always && value > 0 ? '+' : '';
}

function exactText(quanta, always) {
  return sign(quanta, always) + unsigned(quanta, DIGITS);
}

function powerText(exponent) {
  const digits = [...String(Math.abs(exponent))].map((digit) => SUPERSCRIPTS[Number(digit)]).join('');
  return `10${exponent < 0 ? '⁻' : ''}${digits}`;
}

function scientific(value, always) {
  const [mantissa, exponent] = Math.abs(value).toExponential(2).split('e');
  return `${sign(value, always)}${mantissa}${THIN}${TIMES}${THIN}${powerText(Number(exponent))}`;
}

// The value to so many decimals; a value that would be shown as zero, and is not, in powers of ten.
function shortText(quanta, decimals, always) {
  if (showsAllDigits || decimals >= DIGITS) return exactText(quanta, always);
  const units = Math.round(Math.abs(quanta) / 10 ** (DIGITS - decimals));
  if (units === 0 && quanta !== 0) return scientific(quanta * content.quantum, always);
  return sign(quanta, always) + unsigned(units, decimals);
}

// As many decimals as give the largest of the values four digits that count.
function decimalsFor(values) {
  const largest = Math.max(...values.map(Math.abs), 1) * content.quantum;
  return Math.min(DIGITS, Math.max(2, 3 - Math.floor(Math.log10(largest))));
}

function plainText(value, decimals, always) {
  if (showsAllDigits) return sign(value, always) + String(Math.abs(value));
  if (value !== 0 && Math.abs(value) < 0.5 * 10 ** -decimals) return scientific(value, always);
  const [whole, fraction] = Math.abs(value).toFixed(decimals).split('.');
  return sign(value, always) + grouped(whole, fraction || '');
}

// As many decimals as the values of a column have, at most four.
function decimalsOfColumn(values) {
  return Math.min(
    4,
    Math.max(
      0,
      ...values
        .filter((value) => typeof value === 'number')
        .map((value) => {
          const [mantissa, exponent] = String(value).split('e');
          return Math.max(0, (mantissa.split('.')[1] || '').length - Number(exponent || 0));
        }),
    ),
  );
}

// The cells of a table: numbers as numbers with their sources, and texts as texts.
function tableCells(rows, source, firstColumn = 0) {
  const width = Math.max(0, ...rows.map((row) => row.length));
  const decimals = Array.from({ length: width }, (_, column) => decimalsOfColumn(rows.map((row) => row[column])));
  return rows.map((values, row) =>
    values.map((value, column) =>
      typeof value === 'number'
        ? plainNumber(value, `${source}.${row}.${column + firstColumn}`, { decimals: decimals[column] })
        : String(value),
    ),
  );
}

function countText(value) {
  return sign(value) + grouped(String(Math.abs(value)), '');
}

function percentText(value) {
  if (showsAllDigits) return String(value);
  if (value > 0 && value < 0.0005) return `<${THIN}0.1${THIN}%`;
  if (value > 0.9995 && value < 1) return `>${THIN}99.9${THIN}%`;
  return `${(100 * value).toFixed(1)}${THIN}%`;
}

// The element of a number: what is shown, its exact value, and its source, a path in the content or words for a sum.
function numberElement(text, exact, source, title) {
  return el('data', { class: 'number', value: exact, 'data-source': source, title }, text);
}

// A number of quanta: as short as is good to read, or exact.
function quantity(quanta, source, { decimals = 4, always = true } = {}) {
  const element = numberElement(shortText(quanta, decimals, always), quanta, source, exactText(quanta, always));
  element.dataset.unit = 'quantum';
  return element;
}

function exactQuantity(quanta, source, always) {
  return quantity(quanta, source, { decimals: DIGITS, always });
}

function plainNumber(value, source, { decimals = 4, always = false } = {}) {
  return numberElement(plainText(value, decimals, always), value, source, sign(value, always) + Math.abs(value));
}

function count(value, source) {
  return numberElement(countText(value), value, source, String(value));
}

function percent(value, source) {
  return numberElement(percentText(value), value, source, String(value));
}

function plural(number, one, many) {
  return number === 1 ? one : many;
}
