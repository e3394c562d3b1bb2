// The chat: sends messages, shows what comes, stops, tries again.

import { Answer, notice } from "./answer.js";
import { byId, copyButton, make } from "./dom.js";
import { Failure, call, errorText, inWords } from "./gateway.js";
import { requestBody } from "./settings.js";
import { events } from "./stream.js";

const PATH = "v1/chat/completions";
const MAX_ANNOUNCED = 20; // paragraphs that stay in the live region

const messages = []; // of the chat so far, without the system prompt
let open = null; // the AbortController of the request that runs
let isFollowing = true; // the reader sees the end

export function startChat() {
  const field = byId("prompt");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  field.addEventListener("input", () => fit(field));
  byId("stop").addEventListener("click", () => open?.abort());
  byId("new-chat").addEventListener("click", clear);
  const area = byId("transcript");
  area.addEventListener("scroll", () => {
    isFollowing = area.scrollHeight - area.scrollTop - area.clientHeight < 60;
  });
  const curl = copyButton(asCurl, "Copy as curl");
  curl.id = "copy-curl";
  byId("copy-curl").replaceWith(curl);
}

function fit(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function submit() {
  const field = byId("prompt");
  const text = field.value;
  if (!text.trim() || open) return;
  const body = requestBody();
  if (body === null) return;
  field.value = "";
  fit(field);
  messages.push({ role: "user", content: text });
  show(make("article", { className: "turn user" }, make("h3", {}, "You"), make("div", { className: "plain" }, text)));
  answer(body);
}

function show(element) {
  byId("empty").hidden = true;
  byId("transcript").append(element);
  isFollowing = true;
  follow();
}

function follow() {
  const area = byId("transcript");
  if (isFollowing) area.scrollTop = area.scrollHeight;
}

function withMessages(body) {
  const system = byId("system").value.trim();
  return { ...body, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] };
}

/** Ask for an answer to the messages so far, and show it. */
async function answer(body) {
  const name = body.model ?? "Model";
  const shown = new Answer(name, body.response_format !== undefined, (text) => {
    follow();
    announce(text);
  });
  show(shown.element);
  const request = new AbortController();
  open = request;
  isRunning(true);
  say(`${name} answers`);
  let problem = null;
  try {
    await receive(body, request.signal, shown);
  } catch (error) {
    problem = problemOf(error, shown);
  }
  open = null;
  isRunning(false);
  if (!shown.element.isConnected) return; // a new chat began
  shown.end(problem);
  const message = shown.message;
  if (message) messages.push(message);
  if (problem && !message) offerAgain(shown, body);
  if (message?.tool_calls && !problem) offerResults(shown, body);
  say(problem ? `${problem.title}: ${problem.text}` : "The answer is complete");
  follow();
}

async function receive(body, signal, shown) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, signal };
  const response = await call(PATH, { ...options, body: JSON.stringify(withMessages(body)) });
  const warning = response.headers.get("x-inflight-warning");
  if (warning) shown.foot.before(notice({ title: "Note", text: warning }, false));
  const stream = events(response);
  for (;;) {
    const { value, done } = await stream.next();
    if (done && value) return;
    if (done) throw new Failure(0, "The connection ended before the answer did");
    if (value.error) throw new Failure(0, errorText(value));
    shown.add(value);
  }
}

function problemOf(error, shown) {
  if (error.name === "AbortError") return { title: "Stopped", text: "you ended this answer." };
  if (error instanceof Failure && error.status) return inWords(error);
  const text = error instanceof Failure ? error.message : "The connection was lost while the answer came";
  if (shown.firstToken === null) return inWords(new Failure(0, text));
  return { title: "Interrupted", text: `${text.replace(/[.\s]*$/, "")}. The answer is not complete.` };
}

/** A button that sends the last message again; it is no part of the chat until then. */
function offerAgain(shown, body) {
  const again = make("button", { type: "button" }, "Try again");
  const unsent = messages.at(-1).role === "user" ? [messages.pop()] : [];
  again.addEventListener("click", () => {
    if (open) return;
    shown.element.remove();
    messages.push(...unsent);
    answer(requestBody() ?? body);
  });
  shown.foot.replaceChildren(again);
}

/** A button that sends what the called tools returned. */
function offerResults(shown, body) {
  const send = make("button", { type: "button", className: "primary" }, "Send the results");
  send.addEventListener("click", () => {
    if (open) return;
    send.remove();
    for (const { id, name, field } of shown.calls) {
      field.readOnly = true;
      messages.push({ role: "tool", tool_call_id: id, name, content: field.value });
    }
    answer(requestBody() ?? body);
  });
  shown.foot.before(send);
}

function isRunning(value) {
  byId("send").hidden = value;
  byId("stop").hidden = !value;
  if (document.activeElement === document.body) byId("prompt").focus();
}

function clear() {
  open?.abort();
  messages.length = 0;
  byId("announce").replaceChildren();
  byId("transcript").querySelectorAll(".turn").forEach((turn) => turn.remove());
  byId("empty").hidden = false;
  byId("prompt").focus();
}

/** Let a screen reader read a text when it has read the ones before. */
function say(text) {
  const region = byId("announce");
  region.append(make("p", {}, text));
  while (region.childElementCount > MAX_ANNOUNCED) region.firstElementChild.remove();
}

function announce(text) {
  if (text.trim()) say(text);
}

function asCurl() {
  const body = withMessages(requestBody() ?? {});
  const text = byId("prompt").value.trim();
  if (text) body.messages.push({ role: "user", content: text });
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const url = new URL(PATH, location.href);
  return `curl ${url} -H 'Content-Type: application/json' -H "Authorization: Bearer $INFLIGHT_API_KEY" -d '${quoted}'`;
}
