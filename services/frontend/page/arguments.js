// The arguments that a model gives to a tool. They may be anything, so they are checked.

/** The object that a call's arguments are; none are an empty one. Throws an Error that says what they are instead. */
export function parseArguments(text) {
  if (!text.trim()) return {};
  let values;
  try {
    values = JSON.parse(text);
  } catch {
    throw new Error('The arguments are not valid JSON.');
  }
  if (typeof values !== 'object' || values === null || Array.isArray(values)) {
    throw new Error('The arguments must be a JSON object.');
  }
  return values;
}

const TYPES = {
  string: (value) => typeof value === 'string',
  integer: Number.isInteger,
};

/** Throws an Error that names the argument that does not follow the schema: its name, type or range. */
export function checkArguments(values, { properties, required }) {
  for (const name of required) {
    if (!Object.hasOwn(values, name)) throw new Error(`The argument '${name}' is missing.`);
  }
  for (const [name, value] of Object.entries(values)) {
    if (!Object.hasOwn(properties, name)) {
      throw new Error(`There is no argument '${name}'; there are: ${Object.keys(properties).join(', ')}.`);
    }
    const { type, minimum = -Infinity, maximum = Infinity } = properties[name];
    if (!TYPES[type](value)) throw new Error(`The argument '${name}' must be of type ${type}.`);
    if (type === 'integer' && (value < minimum || value > maximum)) {
      throw new Error(`The argument '${name}' is ${value}; ${minimum} to ${maximum} are allowed.`);
    }
  }
}
