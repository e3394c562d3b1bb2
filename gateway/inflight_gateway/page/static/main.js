// Starts the page.

import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { startSettings } from "./settings.js";
import { startStatus } from "./status.js";

/** On narrow screens a button shows a panel in front of the chat; Escape hides it. */
function startPanel(button, panel) {
  const set = (isOpen) => {
    panel.classList.toggle("open", isOpen);
    button.setAttribute("aria-expanded", String(isOpen));
  };
  button.addEventListener("click", () => {
    const isOpen = !panel.classList.contains("open");
    for (const [one, other] of panels) if (other !== panel) one.set(false);
    set(isOpen);
  });
  panel.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    set(false);
    button.focus();
  });
  return { set };
}

const panels = new Map();
for (const name of ["server", "settings"]) {
  const panel = byId(name);
  panels.set(startPanel(byId(`show-${name}`), panel), panel);
}
document.querySelector("main").addEventListener("pointerdown", () => {
  for (const one of panels.keys()) one.set(false);
});
byId("prompt").addEventListener("focus", () => {
  for (const one of panels.keys()) one.set(false);
});

const narrow = matchMedia("(max-width: 799px)"); // as in page.css: beyond, the panel is always shown
const enable = () => { byId("show-server").disabled = !narrow.matches; };
narrow.addEventListener("change", enable);
enable();

startSettings();
startChat();
startStatus();
