// The tools that are built into the page. They are harmless: they read the clock, calculate and draw lots.

import { checkArguments, parseArguments } from './arguments.js';
import { calculate } from './calculator.js';
import { timeIn } from './clock.js';

/** A whole number from 1 to `sides`, each as likely as any other. */
function roll(sides) {
  const range = 2 ** 32 - (2 ** 32 % sides);
  for (;;) {
    const [drawn] = crypto.getRandomValues(new Uint32Array(1));
    if (drawn < range) return 1 + (drawn % sides);
  }
}

/** By name: `title` and `help` for people, the rest for the model; `run` may throw an Error. */
const TOOLS = {
  get_time: {
    title: 'Clock',
    help: 'The time and the weekday in a large city or a time zone.',
    description: 'Get the current time in a city.',
    properties: { city: { type: 'string' } },
    run({ city }) {
      const { time, date } = timeIn(city, new Date());
      return { result: time, day: date.split(',')[0] };
    },
  },
  calculate: {
    title: 'Calculator',
    help: 'Arithmetic with parentheses, powers, roots and the like, to 15 digits.',
    description: 'Calculate an expression with + - * / % ^ and functions.',
    properties: { expression: { type: 'string' } },
    run: ({ expression }) => ({ result: calculate(expression) }),
  },
  roll_dice: {
    title: 'Dice',
    help: 'Random whole numbers, from 1 to the number of sides.',
    description: 'Roll dice.',
    properties: {
      count: { type: 'integer', minimum: 1, maximum: 100 },
      sides: { type: 'integer', minimum: 2, maximum: 1_000_000 },
    },
    run: ({ count, sides }) => ({ result: Array.from({ length: count }, () => roll(sides)) }),
  },
};

/** `{name, title, help}` of each tool. */
export const toolList = Object.entries(TOOLS).map(([name, { title, help }]) => ({ name, title, help }));

const schemaOf = ({ properties }) => ({ type: 'object', properties, required: Object.keys(properties) });

/** The tools of these names as a request offers them. */
export function offered(names) {
  return Object.entries(TOOLS).filter(([name]) => names.includes(name)).map(([name, tool]) => (
    { type: 'function', function: { name, description: tool.description, parameters: schemaOf(tool) } }));
}

/** JSON with spaces, as most models were taught to read it. */
const spaced = (result) => `{${Object.entries(result).map(([name, value]) => `"${name}": ${JSON.stringify(value)}`).join(', ')}}`;

/** Run a call of one of the tools that a request offered. What goes wrong is a result too. */
export function runCall(call, offers) {
  try {
    const names = offers.map((one) => one.function.name);
    if (!names.includes(call.name)) {
      throw new Error(`There is no tool '${call.name}'; there are: ${names.join(', ')}.`);
    }
    const tool = TOOLS[call.name];
    const values = parseArguments(call.arguments);
    checkArguments(values, schemaOf(tool));
    call.result = spaced(tool.run(values));
  } catch (error) {
    call.result = spaced({ error: error.message });
    call.failed = true;
  }
}
