// Shows one answer while it arrives: reasoning, text, calls of tools, and how it ended.

import { codeBlock, copyButton, make } from "./dom.js";
import { GrowingMarkdown, GrowingText } from "./growing.js";
import { isJson, jsonBlock } from "./json.js";

/** How an answer ended, in words; "stop" needs none. */
const ENDINGS = {
  length: "Cut off: the limit of tokens, or the end of the context, was reached.",
  content_filter: "Cut off by a filter.",
};

export class Answer {
  /**
   * `name`: of the model.  `json`: the text is to be JSON.  `drawn(text)`: called after each drawing with the part of
   * the text that is now final.
   */
  constructor(name, json, drawn) {
    this.json = json;
    this.drawn = drawn;
    this.calls = [];
    this.usage = null;
    this.finish = null;
    this.started = performance.now();
    this.firstToken = null;
    this.body = make("div", { className: "content" });
    this.foot = make("footer", { className: "muted small" }, "Waiting for the first token");
    this.element = make("article", { className: "turn assistant", "aria-busy": "true" },
      make("h3", {}, name), this.body, this.foot);
    const code = json ? make("pre", { tabIndex: 0 }) : null;
    if (code) this.body.append(code);
    this.text = code ? new GrowingText(code, () => drawn("")) : new GrowingMarkdown(this.body, drawn);
  }

  /** The message for the next request of the chat; null if nothing was generated. */
  get message() {
    const message = { role: "assistant", content: this.text.text };
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, args }) => ({
        id, type: "function", function: { name, arguments: args.text },
      }));
    }
    return message.content || this.calls.length ? message : null;
  }

  /** Take a chunk of the stream. */
  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const { delta, finish_reason: reason } of chunk.choices ?? []) {
      const reasoning = delta.reasoning_content;
      if (this.firstToken === null && (reasoning || delta.content || delta.tool_calls)) {
        this.firstToken = performance.now();
        this.foot.textContent = "";
      }
      if (reasoning) this.#reason(reasoning);
      if (delta.content) {
        this.#endReasoning();
        this.text.add(delta.content);
      }
      for (const part of delta.tool_calls ?? []) this.#call(part);
      if (reason) this.finish = reason;
    }
  }

  /** The stream is over.  `problem`: why it is not complete, as {title, text}, or null. */
  end(problem) {
    const ended = performance.now();
    this.#endReasoning();
    this.reasoning?.text.end();
    this.text.end();
    if (this.json) this.drawn(this.text.text);
    if (this.json && isJson(this.text.text)) this.body.replaceChildren(jsonBlock(this.text.text));
    for (const call of this.calls) {
      call.args.end();
      if (isJson(call.args.text)) call.block.replaceWith(jsonBlock(call.args.text, "arguments"));
    }
    const copy = this.text.text ? [copyButton(() => this.text.text)] : [];
    this.foot.replaceChildren(...copy, this.#figures(ended));
    const note = problem ?? (ENDINGS[this.finish] && { title: "", text: ENDINGS[this.finish] });
    if (note) this.foot.before(notice(note, problem !== null));
    this.element.setAttribute("aria-busy", "false");
  }

  #reason(text) {
    if (!this.reasoning) {
      const summary = make("summary", {}, "Reasoning …");
      const content = make("div", { className: "plain" });
      const details = make("details", { className: "reasoning" }, summary, content);
      this.body.before(details);
      this.reasoning = { summary, started: performance.now(), text: new GrowingText(content, () => this.drawn("")) };
    }
    this.reasoning.text.add(text);
  }

  #endReasoning() {
    if (!this.reasoning || this.reasoning.over) return;
    this.reasoning.over = true;
    const seconds = (performance.now() - this.reasoning.started) / 1000;
    this.reasoning.summary.textContent = `Reasoned for ${seconds.toFixed(1)} s`;
  }

  #call({ index, id, function: { name, arguments: text } }) {
    this.#endReasoning();
    if (!this.calls[index]) {
      const block = codeBlock("", "arguments");
      const field = make("textarea", { rows: 2, className: "code", spellcheck: false, placeholder: "Result for the model" });
      const label = make("label", {}, `Result of ${name}`, field);
      const call = make("section", { className: "call", "aria-label": `Call of ${name}` },
        make("h4", {}, make("span", { className: "badge" }, "Tool call"), " ", make("code", {}, name)), block, label);
      this.foot.before(call);
      const args = new GrowingText(block.querySelector("code"), () => this.drawn(""));
      this.calls[index] = { id, name, field, block, args };
    }
    if (text) this.calls[index].args.add(text);
  }

  #figures(ended) {
    const parts = [];
    const usage = this.usage;
    if (usage) parts.push(`${usage.completion_tokens} tokens`);
    if (usage && this.firstToken !== null && usage.completion_tokens > 1 && ended > this.firstToken) {
      parts.push(`${((usage.completion_tokens - 1) / (ended - this.firstToken) * 1000).toFixed(1)} tokens/s`);
    }
    if (this.firstToken !== null) parts.push(`first after ${seconds(this.firstToken - this.started)}`);
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens;
      parts.push(`prompt ${usage.prompt_tokens} tokens${cached ? `, ${cached} cached` : ""}`);
    }
    return make("span", {}, parts.join(" · "));
  }
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

/** A box with a title and a text; `isError` decides its colour and whether it is read out at once. */
export function notice({ title, text }, isError, ...more) {
  const properties = { className: isError ? "notice error" : "notice", role: isError ? "alert" : "note" };
  return make("div", properties, title ? make("strong", {}, `${title}:`) : null, title ? " " : null, text, ...more);
}
