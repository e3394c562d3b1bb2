// The settings of a chat -> keys of the request.  They stay in this tab.

import { byId } from "./dom.js";

const STORED = "inflight-settings";
const KEPT = ["system", "temperature", "max-tokens", "thinking", "format", "schema", "tools", "model"];

const EXAMPLES = {
  tools: [{
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city now",
      parameters: {
        type: "object",
        properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
        required: ["city"],
      },
    },
  }],
  schema: {
    type: "object",
    properties: { name: { type: "string" }, age: { type: "integer" }, tags: { type: "array", items: { type: "string" } } },
    required: ["name", "age"],
  },
};

/** Fill the form in from this tab's store, and keep it there. */
export function startSettings() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
    for (const id of KEPT) if (typeof kept[id] === "string" && id !== "model") byId(id).value = kept[id];
    byId("model").dataset.wanted = kept.model ?? "";
  } catch { /* nothing is stored */ }
  const form = byId("options");
  form.addEventListener("input", () => {
    byId("schema-line").hidden = byId("format").value !== "json_schema";
    byId("model").dataset.wanted = byId("model").value;
    try {
      sessionStorage.setItem(STORED, JSON.stringify(Object.fromEntries(KEPT.map((id) => [id, byId(id).value]))));
    } catch { /* the browser stores nothing */ }
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const button of form.querySelectorAll("[data-example]")) {
    const field = byId(button.dataset.example);
    button.addEventListener("click", () => {
      field.value = JSON.stringify(EXAMPLES[field.id], null, 2);
      field.dispatchEvent(new Event("input", { bubbles: true }));
    });
  }
  byId("schema-line").hidden = byId("format").value !== "json_schema";
}

/** Offer these models, of the form {id, reasoning}. */
export function offerModels(models) {
  const select = byId("model");
  const names = models.map(({ id }) => id);
  if (names.join("\n") !== [...select.options].map(({ value }) => value).join("\n")) {
    const options = names.map((name) => new Option(name, name));
    select.replaceChildren(...(options.length ? options : [new Option("no model is ready", "")]));
    const wanted = select.dataset.wanted;
    if (names.includes(wanted)) select.value = wanted;
  }
  byId("thinking-line").hidden = !models.find(({ id }) => id === select.value)?.reasoning;
}

/** The body of a request without its messages; null if a field is wrong, which then says so and has the focus. */
export function requestBody() {
  const body = { model: byId("model").value || undefined, stream: true, stream_options: { include_usage: true } };
  const temperature = byId("temperature");
  const limit = byId("max-tokens");
  if (![temperature, limit].every((field) => field.reportValidity())) return null;
  if (temperature.value !== "") body.temperature = Number(temperature.value);
  if (limit.value !== "") body.max_tokens = Number(limit.value);
  if (byId("thinking").value && !byId("thinking-line").hidden) body.think = byId("thinking").value === "on";
  try {
    if (byId("format").value === "json_object") body.response_format = { type: "json_object" };
    if (byId("format").value === "json_schema") body.response_format = formatOf(parsed("schema"));
    const tools = byId("tools").value.trim() && parsed("tools");
    if (tools) body.tools = toolsOf(tools);
  } catch (error) {
    if (!error.field) throw error;
    if (!byId("settings").classList.contains("open")) byId("show-settings").click();
    byId(error.field).focus();
    return null;
  }
  return body;
}

/** The value of a field with JSON; says what is wrong with it beside the field, and throws. */
function parsed(field) {
  const said = byId(`${field}-error`);
  said.textContent = "";
  try {
    return JSON.parse(byId(field).value);
  } catch (error) {
    said.textContent = `This is not JSON: ${error.message}`;
    throw Object.assign(error, { field });
  }
}

/** A response format for a bare schema, OpenAI's {name, schema}, or a whole response format. */
function formatOf(value) {
  if (value?.type === "json_schema" && value.json_schema) return value;
  const isNamed = typeof value?.schema === "object" && !value.type && !value.properties;
  return { type: "json_schema", json_schema: isNamed ? { name: "answer", ...value } : { name: "answer", schema: value } };
}

/** A list of tools, for one tool, bare functions too. */
function toolsOf(value) {
  const list = Array.isArray(value) ? value : [value];
  return list.map((tool) => (tool?.type === undefined && tool?.name ? { type: "function", function: tool } : tool));
}
