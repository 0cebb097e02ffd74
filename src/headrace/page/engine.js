// The engine view: what the server is doing.

import { getJson } from "./api.js";
import { h } from "./dom.js";

export async function mount(element) {
  const section = h("section", { class: "page-note", "aria-label": "Engine" }, h("h1", {}, "Engine"));
  element.replaceChildren(section);
  try {
    const status = await getJson("v1/status");
    section.append(h("p", {}, `${status.model.name}: ${status.status}`));
  } catch (error) {
    section.append(h("p", { class: "error", role: "alert" }, error.message));
  }
}

export function unmount() {}
