// Texts that grow while they are shown.  The page stays usable with any length: it draws at most a fifth of the time.

import { blocks, finishedUpTo } from "./markdown.js";

const SHARE = 4; // times as long as drawing took, the page does something else

/** Calls `draw` soon after `request`, once for many calls. */
class Drawing {
  constructor(draw) {
    this.draw = draw;
    this.pause = 0;
    this.waiting = false;
  }

  request() {
    if (this.waiting) return;
    this.waiting = true;
    setTimeout(() => requestAnimationFrame(() => {
      this.waiting = false;
      this.now();
    }), this.pause);
  }

  now() {
    const started = performance.now();
    this.draw();
    this.pause = SHARE * (performance.now() - started);
  }
}

/** Markdown: finished blocks are made once, only the last one again and again. */
export class GrowingMarkdown {
  /** `drawn(text)`: called after each drawing with the blocks that were finished by it. */
  constructor(root, drawn) {
    this.root = root;
    this.drawn = drawn;
    this.text = "";
    this.open = ""; // the text behind the finished blocks
    this.openElements = [];
    this.drawing = new Drawing(() => this.#draw(false));
  }

  add(text) {
    this.text += text;
    this.open += text;
    this.drawing.request();
  }

  end() {
    this.#draw(true);
  }

  #draw(ended) {
    const end = ended ? this.open.length : finishedUpTo(this.open, 0);
    const finished = this.open.slice(0, end);
    this.open = this.open.slice(end);
    this.openElements.forEach((element) => element.remove());
    this.openElements = blocks(this.open);
    this.root.append(...blocks(finished), ...this.openElements);
    this.drawn(finished);
  }
}

/** Plain text, as it is. */
export class GrowingText {
  /** `drawn()`: called after each drawing. */
  constructor(root, drawn) {
    this.drawn = drawn;
    this.text = "";
    this.shown = 0;
    this.node = root.appendChild(document.createTextNode(""));
    this.drawing = new Drawing(() => this.end());
  }

  add(text) {
    this.text += text;
    this.drawing.request();
  }

  end() {
    this.node.appendData(this.text.slice(this.shown));
    this.shown = this.text.length;
    this.drawn();
  }
}
