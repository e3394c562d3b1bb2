// Markdown as models write it -> elements.  A subset; anything else is text.  Links lead only to http and https.

import { codeBlock, make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,20}|~{3,20})(?![`~])\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const ITEM = /^( {0,12})(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const RULE = /^ {0,3}(?:-{3,}|\*{3,}|_{3,})\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ROW = /^\s*\|(.*)\|\s*$/;
// Lengths are limited and delimiters excluded, so that no text takes more than linear time.
const INLINE =
  /`([^`\n]{1,1000})`|\*\*([^*\n]{1,1000})\*\*|\*([^*\s][^*\n]{0,500})\*|\[([^\][\n]{1,300})\]\((https?:\/\/[^\s()<>]{1,1000})\)/g;

const MAX_QUOTES = 5; // within each other

/** Elements for a whole text; `depth`: of quotes around it. */
export function blocks(text, depth = 0) {
  const found = [];
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; ) {
    const [element, next] = block(lines, at, depth);
    if (element) found.push(element);
    at = next;
  }
  return found;
}

/** The block that begins at a line, and the line behind it. */
function block(lines, at, depth) {
  const line = lines[at];
  let match;
  if (!line.trim()) return [null, at + 1];
  if ((match = FENCE.exec(line))) return fenced(lines, at + 1, match[1], match[2]);
  if ((match = HEADING.exec(line))) return [make(`h${Math.min(6, match[1].length + 3)}`, {}, ...inline(match[2])), at + 1];
  if (RULE.test(line)) return [make("hr"), at + 1];
  if (ITEM.test(line)) return list(lines, at);
  if (QUOTE.test(line) && depth < MAX_QUOTES) {
    return run(lines, at, QUOTE, (rows) => make("blockquote", {}, ...blocks(rows.join("\n"), depth + 1)));
  }
  if (ROW.test(line)) return run(lines, at, ROW, table);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !starts(lines[end])) end += 1;
  return [make("p", {}, ...inline(lines.slice(at, end).join("\n"))), end];
}

const starts = (line) => [FENCE, HEADING, ITEM, RULE, QUOTE, ROW].some((kind) => kind.test(line));

function fenced(lines, at, fence, language) {
  let end = at;
  while (end < lines.length && !closes(lines[end], fence)) end += 1;
  return [codeBlock(lines.slice(at, end).join("\n"), language), end + 1];
}

const closes = (line, fence) => line.trim().startsWith(fence) && /^[`~]+$/.test(line.trim());

function run(lines, at, kind, build) {
  const rows = [];
  let match;
  while (at < lines.length && (match = kind.exec(lines[at]))) {
    rows.push(match[1]);
    at += 1;
  }
  return [build(rows), at];
}

function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  const element = first[3] ? make("ol", { start: Number(first[3]) }) : make("ul");
  const items = [];
  for (; at < lines.length; at += 1) {
    const match = ITEM.exec(lines[at]);
    if (match && Boolean(match[3]) === Boolean(first[3])) items.push([Math.min(3, match[1].length >> 1), match[4]]);
    else if (!match && lines[at].trim() && /^\s/.test(lines[at])) items.at(-1)[1] += "\n" + lines[at].trim();
    else break;
  }
  element.append(...items.map(([depth, text]) => make("li", { className: `depth-${depth}` }, ...inline(text))));
  return [element, at];
}

function table(rows) {
  const cells = rows.map((row) => row.split("|").map((cell) => cell.trim()));
  const isRule = (row) => row.every((cell) => /^:?-+:?$/.test(cell));
  const headed = cells.length > 1 && isRule(cells[1]);
  const line = (row, tag) => make("tr", {}, ...row.map((cell) => make(tag, {}, ...inline(cell))));
  const body = cells.slice(headed ? 2 : 0).map((row) => line(row, "td"));
  return make("div", { className: "scroll", tabIndex: 0 },
    make("table", {}, headed ? make("thead", {}, line(cells[0], "th")) : null, make("tbody", {}, ...body)));
}

function inline(text) {
  const found = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    found.push(text.slice(at, match.index), span(match));
    at = match.index + match[0].length;
  }
  found.push(text.slice(at));
  return found;
}

function span([, code, strong, emphasis, label, url]) {
  if (code !== undefined) return make("code", {}, code);
  if (strong !== undefined) return make("strong", {}, ...inline(strong));
  if (emphasis !== undefined) return make("em", {}, emphasis);
  return make("a", { href: url, rel: "noopener noreferrer nofollow", target: "_blank", title: url }, label);
}

/** Where the finished blocks of a growing text end, looking from `from`: behind an empty line outside of code. */
export function finishedUpTo(text, from) {
  let end = from;
  let fence = null;
  for (let at = from; ; ) {
    const newline = text.indexOf("\n", at);
    if (newline < 0) return end;
    const line = text.slice(at, newline);
    at = newline + 1;
    const match = FENCE.exec(line);
    if (fence === null && match) fence = match[1];
    else if (fence !== null && closes(line, fence)) {
      fence = null;
      end = at;
    } else if (fence === null && !line.trim()) end = at;
  }
}
