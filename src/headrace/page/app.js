// The shell: views by the address's hash (#/chat/ID, #/engine), theme, and the model's name.

import { getJson } from "./api.js";
import { icon } from "./dom.js";

const VIEWS = {
  chat: () => import("./chat.js"),
  engine: () => import("./engine.js"),
};
const THEMES = ["auto", "light", "dark"];

let current = null;

/** Show the view that the address names. A view has mount(element, argument) and unmount(). */
async function route() {
  const { hash } = location;
  const [, name, argument] = /^#\/(\w*)\/?(.*)$/.exec(hash) ?? [];
  const view = Object.hasOwn(VIEWS, name ?? "") ? name : "chat";
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const module = await VIEWS[view]();
  if (location.hash !== hash) return; // another view was chosen meanwhile
  const element = document.getElementById("view");
  if (current !== module) {
    current?.unmount();
    element.replaceChildren();
    element.dataset.name = view;
    current = module;
  }
  module.mount(element, argument ?? "");
}

function showTheme() {
  const button = document.getElementById("theme");
  const { dataset } = document.documentElement;
  button.replaceChildren(icon(dataset.theme));
  button.ariaLabel = button.title = `Theme: ${dataset.theme}`;
  button.onclick = () => {
    dataset.theme = THEMES[(THEMES.indexOf(dataset.theme) + 1) % THEMES.length];
    localStorage.setItem("headrace.theme", dataset.theme);
    showTheme();
  };
}

addEventListener("hashchange", route);
showTheme();
route();
getJson("v1/models").then((models) => {
  const roots = new Set(models.data.map(({ root }) => root));
  document.getElementById("model").textContent = roots.size > 1 ? `${roots.size} models` : models.data[0].id;
}).catch(() => {});
