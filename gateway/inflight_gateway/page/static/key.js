// The API key of this tab, and the dialog that asks for it.

import { make } from "./dom.js";

const STORED = "inflight-api-key";
const NO_KEY = "A key consists of letters, digits and signs of ASCII, without spaces.";

let current = "";
try { current = sessionStorage.getItem(STORED) ?? ""; } catch { /* nothing is stored: it lasts as long as the page */ }

/** The key, or "". */
export const key = () => current;

let asking = null;

/** Show the dialog; whether a key was given.  Calls at the same time share one dialog. */
export function askForKey(reason) {
  asking ??= showDialog(reason).finally(() => { asking = null; });
  return asking;
}

function showDialog(reason) {
  const field = make("input", { id: "key", type: "password", autocomplete: "off", spellcheck: false, "aria-describedby": "key-error" });
  const error = make("p", { id: "key-error", className: "error small", role: "alert" });
  const cancel = make("button", { type: "button" }, "Cancel");
  const form = make("form", {}, make("h2", { id: "key-title" }, "API key"), make("p", { className: "muted" }, reason),
    make("label", { htmlFor: "key" }, "Key"), field, error,
    make("p", { className: "muted small" }, "It stays in this tab, and is sent to this gateway only."),
    make("div", { className: "row end" }, cancel, make("button", { type: "submit", className: "primary" }, "Use this key")));
  const dialog = make("dialog", { "aria-labelledby": "key-title" }, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    let given = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const value = field.value.trim();
      error.textContent = /^[!-~]+$/.test(value) ? "" : NO_KEY;
      if (error.textContent) return;
      current = value;
      try { sessionStorage.setItem(STORED, value); } catch { /* see above */ }
      given = true;
      dialog.close();
    });
    cancel.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(given);
    });
  });
}
