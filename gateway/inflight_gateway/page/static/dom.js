// Makes elements.  Texts become text nodes, never HTML; the page's policy forbids anything else.

export const byId = (id) => document.getElementById(id);

/** An element; `properties` are set on the object, `data-*`, `aria-*` and `role` as attributes. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** A block of code with a button that copies it. */
export function codeBlock(text, language = "", children = null) {
  const code = make("code", {}, ...(children ?? [text]));
  const copy = copyButton(() => code.textContent);
  return make("div", { className: "code-block" }, make("div", { className: "code-head" }, make("span", {}, language), copy),
    make("pre", { tabIndex: 0 }, code));
}

/** A button that copies what `text()` returns, and says so. */
export function copyButton(text, label = "Copy") {
  const button = make("button", { type: "button", className: "link" }, label);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text); // only with HTTPS, or on this machine
    return true;
  } catch {
    const area = make("textarea", { value: text, className: "hidden" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
