// Calls of the gateway, with the API key of this tab, and its errors in words.

import { askForKey, key } from "./key.js";

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
  for (;;) {
    const sent = key();
    const response = await answer(path, options);
    if (response.ok) return response;
    const failure = await failureOf(response);
    if (failure.status !== 401 || !ask) throw failure;
    if (sent !== key()) continue; // the reader has given another one meanwhile
    if (!(await askForKey(sent ? "The gateway does not accept this key." : "This gateway asks for a key."))) throw failure;
  }
}

async function answer(path, options) {
  const headers = { ...options.headers, ...(key() ? { Authorization: `Bearer ${key()}` } : {}) };
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
