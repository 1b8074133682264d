// Arithmetic, read by hand: numbers, + - * / % ^, parentheses, a few functions and constants.

const LONGEST = 500; // characters
const DEEPEST = 50; // parentheses, signs and powers within each other
const DIGITS = 15; // of a result: 0.1 + 0.2 is 0.3

const CONSTANTS = new Map([['pi', Math.PI], ['e', Math.E]]);
const FUNCTIONS = new Map([
  ...['abs', 'ceil', 'cos', 'exp', 'floor', 'round', 'sin', 'sqrt', 'tan'].map((name) => [name, Math[name]]),
  ['ln', Math.log], ['log', Math.log10], ['max', Math.max], ['min', Math.min],
]);
const MANY = new Set(['max', 'min']); // take any number of values, the others take one
const SIGNS = { '×': '*', '·': '*', '÷': '/', '−': '-', '**': '^' };
const TOKEN = /\s*(?:(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)|([a-z]\w*)|(\*\*|[-+*/%^(),×·÷−]))/iy;

function tokensOf(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < text.length) {
    const at = TOKEN.lastIndex;
    const found = TOKEN.exec(text);
    if (!found) throw new Error(`'${Array.from(text.slice(at).trim())[0]}' cannot be calculated with.`);
    const [, number, name, sign] = found;
    if (number) tokens.push(Number(number));
    else tokens.push(name?.toLowerCase() ?? SIGNS[sign] ?? sign);
  }
  return tokens;
}

class Reader {
  constructor(tokens) {
    this.tokens = tokens;
    this.at = 0;
    this.depth = 0;
  }

  get next() { return this.tokens[this.at]; }

  take(...signs) {
    if (!signs.includes(this.next)) return '';
    this.at += 1;
    return this.tokens[this.at - 1];
  }

  expect(sign) {
    if (!this.take(sign)) throw new Error(`'${sign}' is missing${this.place}.`);
  }

  get place() { return this.next === undefined ? ' at the end' : ` before '${this.next}'`; }

  sum() {
    let value = this.product();
    for (let sign = this.take('+', '-'); sign; sign = this.take('+', '-')) {
      const other = this.product();
      value = sign === '+' ? value + other : value - other;
    }
    return value;
  }

  product() {
    let value = this.signed();
    for (let sign = this.take('*', '/', '%'); sign; sign = this.take('*', '/', '%')) {
      const other = this.signed();
      if (sign !== '*' && other === 0) throw new Error('It divides by zero.');
      if (sign === '*') value *= other;
      else value = sign === '/' ? value / other : value % other;
    }
    return value;
  }

  /** -2^2 is -(2^2), and 2^3^2 is 2^(3^2). */
  signed() {
    this.depth += 1;
    if (this.depth > DEEPEST) throw new Error(`It is nested more than ${DEEPEST} deep.`);
    const sign = this.take('-', '+');
    let value;
    if (sign) {
      value = this.signed();
      if (sign === '-') value = -value;
    } else {
      value = this.single();
      if (this.take('^')) value **= this.signed();
    }
    this.depth -= 1;
    return value;
  }

  single() {
    const token = this.next;
    if (typeof token === 'number') {
      this.at += 1;
      return token;
    }
    if (this.take('(')) {
      const value = this.sum();
      this.expect(')');
      return value;
    }
    if (!/^[a-z]/.test(token ?? '')) throw new Error(`A number is missing${this.place}.`);
    this.at += 1;
    if (CONSTANTS.has(token)) return CONSTANTS.get(token);
    if (FUNCTIONS.has(token)) return this.applied(token);
    throw new Error(`'${token}' is not known; there are: ${[...CONSTANTS.keys(), ...FUNCTIONS.keys()].join(', ')}.`);
  }

  applied(name) {
    this.expect('(');
    const values = [this.sum()];
    while (MANY.has(name) && this.take(',')) values.push(this.sum());
    this.expect(')');
    return FUNCTIONS.get(name)(...values);
  }
}

/** The value of an expression. Throws an Error that says what cannot be calculated. */
export function calculate(expression) {
  if (expression.length > LONGEST) throw new Error(`It is longer than ${LONGEST} characters.`);
  const reader = new Reader(tokensOf(expression.trimEnd()));
  const value = reader.sum();
  if (reader.next !== undefined) throw new Error(`'${reader.next}' is not expected here.`);
  if (Number.isNaN(value)) throw new Error('The result is not a real number.');
  if (!Number.isFinite(value)) throw new Error('The result is too large.');
  return Number(value.toPrecision(DIGITS)) + 0; // no -0
}
