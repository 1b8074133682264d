// The page at /docs: reads /openapi.json and shows it.

import { references, words } from "./fields.js";

function node(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) made[name] = value;
  made.append(...children);
  return made;
}

function table(heads, rows) {
  const body = rows.map((cells) => node("tr", {}, ...cells.map((cell) => node("td", {}, cell))));
  const head = node("tr", {}, ...heads.map((text) => node("th", { textContent: text })));
  return node("table", {}, node("thead", {}, head), node("tbody", {}, ...body));
}

const code = (text) => node("code", { textContent: text });

function fieldRows(schema) {
  const required = new Set(schema.required ?? []);
  return Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const label = node("span", {}, code(name));
    if (required.has(name)) label.append(node("span", { className: "needed", textContent: " required" }));
    return [label, words(field), field.description ?? ""];
  });
}

// An object's fields, and behind them those of the objects in it, each once.
function objectView(name, schemas, shown) {
  if (shown.has(name) || !schemas[name]) return [];
  shown.add(name);
  const schema = schemas[name];
  const views = [];
  if (schema.description) views.push(node("p", { className: "about", textContent: schema.description }));
  if (schema.properties) views.push(table(["field", "allowed", "meaning"], fieldRows(schema)));
  for (const inner of references(schema)) {
    const within = objectView(inner, schemas, shown);
    if (within.length) {
      views.push(node("details", {}, node("summary", {}, code(inner)), node("div", { className: "inside" }, ...within)));
    }
  }
  return views;
}

function schemaView(schema, schemas) {
  const views = [node("p", { textContent: words(schema) })];
  const shown = new Set();
  for (const name of references(schema)) views.push(...objectView(name, schemas, shown));
  return views;
}

function contentView(content, schemas) {
  return Object.entries(content ?? {}).flatMap(([type, media]) => {
    const item = media.itemSchema?.properties?.data?.contentSchema ?? media.itemSchema;
    const about = item ? `${type}: each event` : type;
    const views = schemaView(item ?? media.schema ?? {}, schemas);
    return [node("details", {}, node("summary", {}, code(about)), node("div", { className: "inside" }, ...views))];
  });
}

// Names of all fields of a body, those of the objects in it included.
function fieldNames(schema, schemas) {
  const seen = new Set();
  const found = [];
  const look = (one) => {
    for (const name of references(one)) {
      if (seen.has(name) || !schemas[name]) continue;
      seen.add(name);
      found.push(...Object.keys(schemas[name].properties ?? {}));
      look(schemas[name]);
    }
  };
  look(schema);
  return found;
}

function routeView(path, method, operation, description) {
  const schemas = description.components.schemas;
  const inside = node("div", { className: "inside" });
  const head = node(
    "summary", {},
    node("code", { className: "method", textContent: method.toUpperCase() }),
    code(path),
    node("span", { className: "about", textContent: operation.summary ?? "" }),
  );
  const view = node("details", { id: operation.operationId }, head, inside);
  const fill = () => {
    if (!view.open || inside.childElementCount) return;
    const security = operation.security ?? description.security ?? [];
    inside.append(node("p", { className: "about", textContent: security.length ? "Needs a key: Authorization: Bearer KEY, or x-api-key: KEY." : "Needs no key." }));
    if (operation.parameters) {
      const rows = operation.parameters.map((one) => [code(one.name), `${words(one.schema)}, in the ${one.in}`, one.description ?? ""]);
      inside.append(node("h3", { textContent: "Parameters" }), table(["name", "allowed", "meaning"], rows));
    }
    const taken = operation.requestBody?.content["application/json"]?.schema;
    if (taken) inside.append(node("h3", { textContent: "Body" }), ...schemaView(taken, schemas));
    inside.append(node("h3", { textContent: "Answer" }), ...contentView(operation.responses["200"]?.content, schemas));
    const errors = Object.entries(operation.responses).filter(([status]) => status !== "200");
    inside.append(node("h3", { textContent: "Other statuses" }), table(["status", "when"], errors.map(([status, one]) => [code(status), one.description])));
  };
  view.addEventListener("toggle", fill);
  const body = operation.requestBody?.content["application/json"]?.schema;
  const fields = body ? fieldNames(body, schemas) : [];
  view.dataset.words = [method, path, operation.summary, ...fields].join(" ").toLowerCase();
  return view;
}

function show(description) {
  const groups = new Map();
  for (const [path, operations] of Object.entries(description.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const group = operation.tags?.[0] ?? "Server";
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(routeView(path, method, operation, description));
    }
  }
  const main = document.getElementById("routes");
  main.replaceChildren();
  for (const [group, views] of groups) main.append(node("section", {}, node("h2", { textContent: group }), ...views));
  document.getElementById("version").textContent = description.info.version;
  document.getElementById("search").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    for (const section of main.children) {
      const views = [...section.querySelectorAll(":scope > details")];
      for (const view of views) view.hidden = !view.dataset.words.includes(wanted);
      section.hidden = views.every((view) => view.hidden);
    }
  });
  const named = location.hash && document.getElementById(location.hash.slice(1));
  if (named) {
    named.open = true;
    named.scrollIntoView();
  }
}

try {
  const answer = await fetch("openapi.json");
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  show(await answer.json());
} catch (error) {
  document.getElementById("state").textContent = `The description cannot be read: ${error.message}`;
}
