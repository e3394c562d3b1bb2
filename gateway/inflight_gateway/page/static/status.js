// The state of the server, asked for every two seconds while the page is visible.

import { byId, make } from "./dom.js";
import { call, inWords } from "./gateway.js";
import { askForKey, key } from "./key.js";
import { Rates } from "./rates.js";
import { offerModels } from "./settings.js";

const PAUSE = 2000; // ms between two questions
const PATIENCE = 10_000; // ms for an answer
const MAX_PAUSE = 30_000;
const CURVE = 60; // points

const rates = new Rates();
const curve = [];
let refused = false; // the reader gave no key
let failures = 0;
let timer = 0;

export function startStatus() {
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  byId("change-key").addEventListener("click", async () => {
    if (await askForKey("")) look();
  });
  look();
}

async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const options = { get signal() { return AbortSignal.timeout(PATIENCE); } }; // anew after the reader has typed a key
    const response = await call("page/status", options, !refused);
    show(await response.json());
    failures = 0;
    refused = false;
  } catch (error) {
    failures += 1;
    failed(error);
  }
  timer = setTimeout(look, Math.min(MAX_PAUSE, PAUSE * 2 ** Math.max(0, failures - 1)));
}

function failed(error) {
  const isRefusal = error.status === 401;
  refused = isRefusal;
  byId("key-line").hidden = !isRefusal && !key();
  byId("change-key").textContent = isRefusal ? "Enter the API key" : "Change the API key";
  health("down", isRefusal ? "Needs a key" : "No answer");
  problem(isRefusal ? "This gateway asks for an API key." : inWords(error).text);
  figures([]);
}

function health(state, text) {
  byId("dot").className = `dot ${state}`;
  if (byId("health").textContent !== text) byId("health").textContent = text; // it is read out
}

function problem(text) {
  byId("problem").hidden = !text;
  if (byId("problem").textContent !== text) byId("problem").textContent = text;
}

function show(status) {
  const loads = status.tritons.flatMap(({ address, models }) => models.map((model) => ({ address, ...model })));
  rates.take(status.time, loads);
  offerModels(status.models);
  showHealth(status, loads);
  figures(loads);
  byId("models").replaceChildren(...(status.models.length ? status.models.map((model) => modelLine(model, loads))
    : [make("li", { className: "muted" }, "No model is ready.")]));
  byId("tritons").replaceChildren(...status.tritons.map(tritonLine));
  byId("version").textContent = `Inflight ${status.version} · ${count(status.open_requests, "request")} open · routing: ${status.routing}`;
  byId("key-line").hidden = !key();
}

function showHealth({ tritons, models, problem: text }, loads) {
  const down = tritons.filter(({ up }) => !up).length;
  const bad = loads.filter(({ state }) => state !== "ready").length;
  const serves = models.length > 0 && loads.some(({ state }) => state === "ready");
  problem(text ?? (serves ? "" : "No model can answer now."));
  if (!serves) health("down", "No model is ready");
  else if (down) health("partly", `${down} of ${tritons.length} down`);
  else if (bad) health("partly", "A model has a problem");
  else health("up", "Ready");
}

function figures(loads) {
  const rate = rates.total(loads);
  byId("running").textContent = number(sum(loads, "running"));
  byId("waiting").textContent = number(sum(loads, "waiting"));
  byId("rate").textContent = rate === null ? "–" : number(rate);
  share("kv", sum(loads, "kv_blocks_used"), sum(loads, "kv_blocks"));
  share("hits", sum(loads, "prefix_hits"), sum(loads, "prefix_queries"));
  if (rate === null) return;
  curve.push(rate);
  if (curve.length > CURVE) curve.shift();
  const top = Math.max(1, ...curve);
  const points = curve.map((value, at) => `${120 - 2 * (curve.length - 1 - at)},${(31 - 29 * value / top).toFixed(1)}`);
  byId("curve").firstElementChild.setAttribute("d", `M${points.join("L")}`);
}

function share(id, part, whole) {
  const value = part !== null && whole ? part / whole : null;
  byId(id).textContent = value === null ? "–" : percent(value);
  byId(`${id}-bar`).value = value ?? 0;
}

/** The sum of a field, or null if no model tells it. */
function sum(loads, field) {
  const known = loads.map((load) => load[field]).filter((value) => typeof value === "number");
  return known.length ? known.reduce((one, other) => one + other, 0) : null;
}

const number = (value) => (value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 }));
const percent = (value) => `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
const count = (value, what) => `${number(value)} ${what}${value === 1 ? "" : "s"}`;

function modelLine(model, loads) {
  const own = loads.filter((load) => load.model === model.id);
  const rate = rates.total(own);
  const facts = [model.max_model_len ? `context ${number(model.max_model_len)}` : null,
    rate === null ? null : `${number(rate)} tokens/s`].filter(Boolean);
  return make("li", {}, make("strong", {}, model.id), make("span", { className: "muted small" }, facts.join(" · ")));
}

function tritonLine({ address, up, models }) {
  const head = make("div", { className: "row" }, make("span", { className: "address" }, address), mark(up ? "up" : "down", up ? "up" : "down"));
  return make("li", {}, head, ...models.map(loadLine));
}

function loadLine(load) {
  const state = { ready: "up", "not loaded": "down", failed: "down", unresponsive: "down" }[load.state] ?? "partly";
  const facts = [];
  if (load.running !== null) facts.push(`${number(load.running)} running`, `${number(load.waiting)} waiting`);
  if (load.kv_blocks) facts.push(`KV ${percent(load.kv_blocks_used / load.kv_blocks)}`);
  return make("div", { className: "load small" },
    make("div", { className: "row" }, make("span", { className: "name" }, load.model), mark(state, load.state)),
    facts.length ? make("div", { className: "muted" }, facts.join(" · ")) : null,
    load.reason ? make("div", { className: "muted" }, load.reason) : null);
}

const mark = (state, text) => make("span", { className: "mark" }, make("span", { className: `dot ${state}` }), text);
