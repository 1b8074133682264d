// What a JSON schema says, in words.

const MANY = { integer: "whole numbers", number: "numbers", string: "strings", array: "arrays", object: "objects", boolean: "booleans" };
const ONE = { integer: "whole number", number: "number", string: "string", array: "array", object: "object", boolean: "true or false", null: "null" };

export function nameOf(schema) {
  return schema.$ref ? schema.$ref.split("/").pop() : "";
}

function range(schema) {
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  const above = schema.exclusiveMinimum !== undefined ? "above" : "from";
  if (low === undefined && high === undefined) return "";
  if (high === undefined) return ` ${above} ${low}`;
  return low === undefined ? ` up to ${high}` : ` ${above} ${low} to ${high}`;
}

function size(least, most, unit) {
  if (most !== undefined) return ` of ${least ? `${least} to ` : "at most "}${most} ${unit}`;
  return least ? ` of at least ${least} ${unit}` : "";
}

// The words for a schema; null is left out, since it means the same as no value.
export function words(schema) {
  if (schema.$ref) return nameOf(schema);
  if (schema.enum) return schema.enum.filter((one) => one !== null).map((one) => JSON.stringify(one)).join(", ") || "null";
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const branches = schema.anyOf ?? schema.oneOf;
  if (branches) {
    const found = branches.filter((one) => one.type !== "null").map(words);
    return [...new Set(found)].join(" or ");
  }
  switch (schema.type) {
    case "integer": case "number": return ONE[schema.type] + range(schema);
    case "string": return ONE.string + size(schema.minLength, schema.maxLength, "characters");
    case "array": {
      const item = schema.items ?? {};
      const unit = item.$ref ? `${nameOf(item)} objects` : MANY[item.type] ?? "values";
      const sized = size(schema.minItems, schema.maxItems, unit);
      return `array${sized || ` of ${unit}`}`;
    }
    default: return ONE[schema.type] ?? "any value";
  }
}

// Names of the objects that a schema speaks of.
export function references(schema) {
  const found = [];
  const look = (one) => {
    if (one === null || typeof one !== "object") return;
    if (typeof one.$ref === "string") found.push(nameOf(one));
    for (const value of Object.values(one)) look(value);
  };
  look(schema);
  return [...new Set(found)];
}
