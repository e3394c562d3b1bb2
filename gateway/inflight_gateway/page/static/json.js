// JSON as the server sent it, indented.  Numbers and keys stay as they are written, which `JSON.parse` does not promise.

import { codeBlock, make } from "./dom.js";

const TOKEN = /"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g;

/** Whether a text is JSON. */
export function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** A block of code with an indented JSON text, or the text as it is if it is not JSON. */
export function jsonBlock(text, title = "json") {
  return isJson(text) ? codeBlock("", title, indented(text)) : codeBlock(text);
}

function indented(text) {
  const parts = [];
  const tokens = text.match(TOKEN) ?? [];
  let depth = 0;
  const line = () => parts.push("\n" + "  ".repeat(Math.min(depth, 40)));
  tokens.forEach((token, at) => {
    const next = tokens[at + 1];
    if (token === "{" || token === "[") {
      depth += 1;
      parts.push(token);
      if (next !== "}" && next !== "]") line();
    } else if (token === "}" || token === "]") {
      depth -= 1;
      if (!"{[".includes(tokens[at - 1])) line();
      parts.push(token);
    } else if (token === ",") {
      parts.push(token);
      line();
    } else if (token === ":") {
      parts.push(": ");
    } else {
      const kind = token[0] === '"' ? (next === ":" ? "name" : "string") : "value";
      parts.push(make("span", { className: `json-${kind}` }, token));
    }
  });
  return parts;
}
