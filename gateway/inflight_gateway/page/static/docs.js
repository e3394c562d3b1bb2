// The endpoints, from the gateway's OpenAPI document: keys of the bodies, an example, and a request that can be sent.

import { byId, codeBlock, make } from "./dom.js";
import { Failure, call, inWords } from "./gateway.js";
import { jsonBlock } from "./json.js";

const MAX_SHOWN = 100_000; // characters of an answer

const EXAMPLES = {
  "/v1/chat/completions": { messages: [{ role: "user", content: "Hi" }], max_tokens: 32 },
  "/v1/completions": { prompt: "Once upon a time", max_tokens: 32 },
  "/v1/responses": { input: "Hi", max_output_tokens: 32 },
  "/v1/responses/input_tokens": { input: "Hi" },
  "/v1/messages": { max_tokens: 32, messages: [{ role: "user", content: "Hi" }] },
  "/v1/messages/count_tokens": { messages: [{ role: "user", content: "Hi" }] },
  "/tokenize": { prompt: "Hi" },
  "/detokenize": { tokens: [1, 2, 3] },
  "/api/chat": { messages: [{ role: "user", content: "Hi" }], stream: false },
  "/api/generate": { prompt: "Hi", stream: false },
  "/api/show": {},
  "/invocations": { messages: [{ role: "user", content: "Hi" }], max_tokens: 32 },
};

let model = "NAME"; // a model of this server, for the examples

async function start() {
  try {
    const spec = await json("openapi.json"); // first, because it asks for the key
    model = (await json("v1/models", false).catch(() => null))?.data?.[0]?.id ?? model;
    show(spec);
  } catch (error) {
    const { title, text } = inWords(error instanceof Failure ? error : new Failure(0, String(error)));
    byId("problem").hidden = false;
    byId("problem").textContent = `${title}: ${text} The list below is all that is shown without it.`;
  }
}

const json = async (path, ask = true) => (await call(path, {}, ask)).json();

function show(spec) {
  byId("about").textContent = `${spec.info.title}, version ${spec.info.version}.`;
  const download = byId("download"); // the browser itself would send no key
  download.href = URL.createObjectURL(new Blob([JSON.stringify(spec, null, 2)], { type: "application/json" }));
  const endpoints = Object.entries(spec.paths).flatMap(([path, verbs]) =>
    Object.entries(verbs).map(([verb, operation]) => endpoint(spec, path, verb, operation)));
  byId("endpoints").replaceChildren(...endpoints.map(({ element }) => element));
  const filter = () => narrow(endpoints, byId("filter").value.trim().toLowerCase());
  byId("filter").addEventListener("input", filter);
  filter();
}

function narrow(endpoints, text) {
  let shown = 0;
  for (const { element, words, rows } of endpoints) {
    element.hidden = !words.includes(text);
    shown += !element.hidden;
    for (const { row, name } of rows()) row.classList.toggle("found", text !== "" && name.includes(text));
  }
  byId("found").textContent = text ? `${shown} of ${endpoints.length} endpoints` : `${endpoints.length} endpoints`;
}

/** An endpoint; its content is made when it is opened. */
function endpoint(spec, path, verb, operation) {
  const content = make("div");
  const summary = make("summary", {}, make("span", { className: `verb ${verb}` }, verb.toUpperCase()), make("code", {}, path),
    make("span", { className: "muted small" }, operation.summary));
  const element = make("details", { className: "endpoint" }, summary, content);
  const schemas = bodySchemas(spec, operation);
  const keys = schemas.flatMap(({ schema }) => Object.keys(schema.properties ?? {}));
  let rows = [];
  element.addEventListener("toggle", () => {
    if (!element.open || content.childElementCount) return;
    for (const { name, schema } of schemas) {
      const table = keyTable(spec, schema);
      rows = rows.concat(table.rows);
      content.append(make("h4", {}, schemas.length > 1 ? `Keys of ${name}` : "Keys of the body"), table.element);
    }
    content.append(...tryIt(path, verb));
    byId("filter").dispatchEvent(new Event("input"));
  });
  const words = [verb, path, operation.summary, ...keys].join("\n").toLowerCase();
  return { element, words, rows: () => rows };
}

function bodySchemas(spec, operation) {
  const schema = operation.requestBody?.content["application/json"].schema;
  const all = schema?.anyOf ?? (schema ? [schema] : []);
  return all.map((one) => ({ name: one.$ref.split("/").at(-1), schema: resolve(spec, one) }));
}

const resolve = (spec, schema) => (schema.$ref ? spec.components.schemas[schema.$ref.split("/").at(-1)] : schema);

function keyTable(spec, schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, value]) => {
    const cells = [name, required.has(name) ? "required" : "", typeOf(spec, value), value.default == null ? "" : JSON.stringify(value.default)];
    return { name: name.toLowerCase(), row: make("tr", {}, ...cells.map((cell) => make("td", {}, cell))) };
  });
  const head = make("tr", {}, ...["key", "", "type", "default"].map((text) => make("th", { scope: "col" }, text)));
  const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows.map(({ row }) => row)));
  return { rows, element: make("div", { className: "scroll", tabIndex: 0 }, table) };
}

/** A type in words, such as "integer or null". */
function typeOf(spec, schema, depth = 0) {
  const found = resolve(spec, schema);
  if (found.enum) return found.enum.map((value) => JSON.stringify(value)).join(", ");
  if (found.const !== undefined) return JSON.stringify(found.const);
  const options = found.anyOf ?? found.oneOf;
  if (options && depth < 4) return [...new Set(options.map((one) => typeOf(spec, one, depth + 1)))].join(" or ");
  if (found.type === "array" && found.items && depth < 4) return `list of ${typeOf(spec, found.items, depth + 1)}`;
  return Array.isArray(found.type) ? found.type.join(" or ") : found.type ?? "any";
}

/** An example as curl, and the same request with a button that sends it. */
function tryIt(path, verb) {
  const example = EXAMPLES[path] ? { model, ...EXAMPLES[path] } : null;
  const url = () => path.replace("{model}", encodeURIComponent(model));
  const field = example === null ? null
    : make("textarea", { className: "code", rows: 8, spellcheck: false, value: JSON.stringify(example, null, 2) });
  const curl = codeBlock("");
  const write = () => {
    const address = new URL(url().slice(1), new URL("./", location.href));
    const data = field ? ` \\\n  -H 'Content-Type: application/json' \\\n  -d '${field.value.replaceAll("'", "'\\''")}'` : "";
    const verbOption = verb === "post" && !field ? " -X POST" : "";
    curl.querySelector("code").textContent = `curl${verbOption} ${address} \\\n  -H "Authorization: Bearer $INFLIGHT_API_KEY"${data}`;
  };
  field?.addEventListener("input", write);
  write();
  const result = make("div", { role: "status" });
  const send = make("button", { type: "button", className: "primary" }, "Send");
  send.addEventListener("click", () => sent(send, url().slice(1), verb, field?.value, result));
  return [make("h4", {}, "Try it"), field ? make("label", {}, "Body", field) : null,
    make("p", { className: "row end" }, send), result, make("h4", {}, "As curl"), curl].filter(Boolean);
}

async function sent(button, path, verb, body, result) {
  button.disabled = true;
  try {
    const headers = body === undefined ? {} : { "Content-Type": "application/json" };
    const response = await call(path, { method: verb.toUpperCase(), headers, body });
    const text = await response.text();
    const note = `${response.status} ${response.headers.get("content-type") ?? ""}`;
    const cut = text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}\n… ${text.length - MAX_SHOWN} more characters` : text;
    result.replaceChildren(make("p", { className: "muted small" }, note), text ? jsonBlock(cut) : "");
  } catch (error) {
    const { title, text } = inWords(error instanceof Failure ? error : new Failure(0, String(error)));
    result.replaceChildren(make("div", { className: "notice error" }, make("strong", {}, `${title}:`), " ", text));
  } finally {
    button.disabled = false;
  }
}

start();
