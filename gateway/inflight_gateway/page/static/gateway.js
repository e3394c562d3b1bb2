// Calls of the gateway, with the API key of this tab, and its errors in words.

import { byId } from "./dom.js";

const STORED = "inflight-api-key";
let key = "";
try { key = sessionStorage.getItem(STORED) ?? ""; } catch { /* the browser stores nothing: the key lasts as long as the page */ }

export const hasKey = () => key !== "";

/** A failure that the page shows: `status` is HTTP's, or 0 if no answer came. */
export class Failure extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** The response to a request that was accepted.  Asks for a key if the gateway does; throws a Failure. */
export async function call(path, options = {}, ask = true) {
  for (let first = true; ; first = false) {
    const sent = key;
    const response = await answer(path, options);
    if (response.ok) return response;
    const failure = await failureOf(response);
    if (failure.status !== 401 || !ask) throw failure;
    const refused = sent !== "" && (sent === key || !first);
    if (!(await askForKey(refused ? "The gateway does not accept this key." : "This gateway asks for a key."))) throw failure;
  }
}

async function answer(path, options) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  try {
    return await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "The gateway does not answer. It may have stopped, or the network is down.");
  }
}

async function failureOf(response) {
  const seconds = Number(response.headers.get("retry-after")) || null;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = errorText(await response.json()) || message;
  } catch { /* a proxy's own error */ }
  return new Failure(response.status, message, seconds);
}

/** The message of an error object, or "". */
export const errorText = (value) => (typeof value?.error === "string" ? value.error : value?.error?.message ?? "");

const TITLES = {
  0: "No connection", 400: "The request is not valid", 401: "The key is not accepted", 403: "Not allowed here",
  404: "Not found", 413: "The request is too large", 429: "The server is busy", 500: "The server has a fault",
  503: "No model can answer now", 504: "The time is up",
};

/** A title, and what to do about a failure. */
export function inWords(failure) {
  const title = TITLES[failure.status] ?? `The server answered ${failure.status}`;
  const isSaid = failure.retryAfter == null || /retry in/.test(failure.message);
  const wait = isSaid ? "" : ` Try again in ${failure.retryAfter} s.`;
  return { title, text: failure.message.replace(/[.\s]*$/, ".") + wait };
}

let asking = null;

/** Show the dialog; whether a key was given.  Calls at the same time share one dialog. */
export function askForKey(reason) {
  asking ??= showDialog(reason).finally(() => { asking = null; });
  return asking;
}

function showDialog(reason) {
  const [dialog, form, field, error] = ["key-dialog", "key-form", "key", "key-error"].map(byId);
  byId("key-reason").textContent = reason;
  field.value = error.textContent = "";
  dialog.showModal();
  return new Promise((resolve) => {
    let given = false;
    form.onsubmit = (event) => {
      event.preventDefault();
      const value = field.value.trim();
      if (!/^[!-~]+$/.test(value)) {
        error.textContent = "A key consists of letters, digits and signs of ASCII, without spaces.";
        return;
      }
      key = value;
      try { sessionStorage.setItem(STORED, key); } catch { /* see above */ }
      given = true;
      dialog.close();
    };
    byId("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => resolve(given);
  });
}
