// Writes out /openapi.json: each operation, the fields that it takes, and what it answers.

const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

const nameOf = (reference) => reference.split("/").at(-1);

function typeOf(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.anyOf) {
    return [...new Set(schema.anyOf.map(typeOf))].filter((one) => one !== "null").join(" or ");
  }
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  return schema.type ?? "anything";
}

// The bounds of a number or a list, also where null may stand in its place.
function rangeOf(schema) {
  const forms = schema.anyOf ?? [schema];
  const said = forms.map((one) => {
    const low = one.minimum ?? one.minItems;
    const high = one.maximum ?? one.maxItems;
    const parts = [];
    if (low > -Number.MAX_SAFE_INTEGER) parts.push(`from ${low}`);
    if (one.exclusiveMinimum !== undefined) parts.push(`above ${one.exclusiveMinimum}`);
    if (high < 2 ** 31 - 1) parts.push(`to ${high}`);
    return parts.join(" ");
  });
  return said.filter(Boolean).join("; ");
}

function fields(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, one]) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, element("code", { textContent: name })),
      element("td", { textContent: typeOf(one) }),
      element("td", {
        textContent: [required.has(name) ? "required" : "", rangeOf(one), one.description ?? ""]
          .filter(Boolean)
          .join(" · "),
      }),
    ),
  );
  const head = ["Field", "Type", "Notes"].map((one) =>
    element("th", { scope: "col", textContent: one }),
  );
  return element(
    "div",
    { className: "scroll", tabIndex: 0 },
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)),
  );
}

function answers(operation) {
  const rows = Object.entries(operation.responses).map(([status, one]) =>
    element("li", {}, element("code", { textContent: status }), ` ${one.description}`),
  );
  return element("ul", {}, ...rows);
}

async function write() {
  const api = await (await fetch("/openapi.json")).json();
  const main = document.getElementById("reference");
  main.append(element("p", { className: "muted", textContent: api.info.description }));
  const named = api.components.schemas;
  for (const [path, operations] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const verb = element("span", { className: "verb", textContent: method.toUpperCase() });
      const section = element(
        "section",
        {},
        element("h2", {}, verb, element("code", { textContent: path })),
        element("p", { textContent: operation.description }),
      );
      const body = operation.requestBody?.content["application/json"].schema;
      if (body) section.append(element("h3", { textContent: "Body" }), fields(named[nameOf(body.$ref)]));
      section.append(element("h3", { textContent: "Answers" }), answers(operation));
      main.append(section);
    }
  }
  main.append(element("h2", { textContent: "Types" }));
  for (const [name, schema] of Object.entries(named)) {
    if (name.endsWith("Body") && (name.startsWith("Chat") || name.startsWith("Completion"))) continue;
    const about = element("p", { textContent: schema.description ?? "" });
    main.append(element("section", { id: name }, element("h3", { textContent: name }), about, fields(schema)));
  }
  main.setAttribute("aria-busy", "false");
}

write();
