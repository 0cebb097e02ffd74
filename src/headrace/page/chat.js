// The chat view.

import { h } from "./dom.js";

export function mount(element) {
  element.replaceChildren(h("p", { class: "page-note" }, "The chat is being built."));
}

export function unmount() {}
