// The served models: a panel with their states, memory and buttons, and the choice of a conversation's model.

import { call, getJson } from "./api.js";
import { announce, bytes, h, panel, percent, seconds, table } from "./dom.js";

const STATES = { sleeping: "not loaded", loading: "loading", loaded: "loaded", failed: "failed" };

/** The panel: [element, update], where update takes the status. */
export function modelsPanel() {
  const list = table("Models", ["Model", "State", "Memory", "Requests", "Action"]);
  const problem = h("p", { class: "error", role: "alert" });
  const rows = new Map();
  return [panel("Models", list.element, problem), ({ models }) => {
    for (const model of models) {
      if (!rows.has(model.name)) {
        rows.set(model.name, modelRow(list.row, model.name, (text) => (problem.textContent = text)));
        list.body.append(rows.get(model.name)[0]);
      }
      rows.get(model.name)[1](model);
    }
  }];
}

function modelRow(row, name, report) {
  const aliases = h("small", { class: "muted" });
  const badge = h("span", { class: "badge" });
  const progress = h("progress", { max: 1, "aria-label": `Loading of ${name}` });
  const note = h("small");
  const [memory, requests] = ["span", "span"].map((tag) => h(tag));
  let action = "";
  const button = h("button", { type: "button", onclick: () => change(name, action, button, report) });
  const element = row(h("span", {}, h("b", {}, name), aliases), h("span", {}, badge, progress, note), memory, requests, button);
  return [element, (model) => {
    const isLoading = model.state === "loading";
    aliases.textContent = model.names.slice(1).join(", ");
    badge.className = `badge ${model.state}`;
    badge.textContent = STATES[model.state];
    progress.hidden = !isLoading || model.progress === null;
    progress.value = model.progress ?? 0;
    note.textContent = isLoading ? loadingText(model) : model.reason ?? (model.is_kept ? "kept loaded" : "");
    memory.textContent = model.state === "loaded" ? `${bytes(model.weights_bytes)} weights, ${bytes(model.budget_bytes)} for states and caches` : "–";
    requests.textContent = String(model.num_requests);
    action = isLoading || model.state === "loaded" ? "unload" : "load";
    button.textContent = isLoading ? "Cancel" : action === "load" ? "Load" : "Unload";
    button.ariaLabel = isLoading ? `Cancel loading ${name}` : `${button.textContent} ${name}`;
    button.classList.toggle("danger", action === "unload");
  }];
}

/** How far a load is. */
export function loadingText({ progress, loading_s }) {
  if (loading_s === null) return "waits for its files or for memory";
  return progress === null ? seconds(loading_s) : `${percent(progress)}, ${seconds(loading_s)}`;
}

/** Load or unload. The status shows what comes of it. A load that is cancelled, here or elsewhere, is no error. */
async function change(name, action, button, report) {
  report("");
  if (action === "unload") button.disabled = true;
  try {
    await call(`v1/models/${encodeURIComponent(name)}/${action}`, { method: "POST" });
    announce(action === "load" ? `${name} is loaded` : `${name} is not loaded any more`);
  } catch (error) {
    if (error.status !== 499) report(error.message);
  } finally {
    button.disabled = false;
  }
}

/** Models as /v1/models lists them, those for chats alone if some of the others are for something else. */
export async function chatModels() {
  const { data } = await getJson("v1/models");
  const able = data.filter(({ capabilities }) => !capabilities?.length || capabilities.includes("chat"));
  return able.length ? able : data;
}

/** What a conversation without a choice of its own uses: the first that is loaded. */
export const defaultModel = (models) => (models.find(({ state }) => state === "loaded") ?? models[0]).id;

/** A choice with models and their states. `chosen` is called with a name, `refresh` when it is about to be opened. */
export function modelPicker(chosen, refresh) {
  const select = h("select", { class: "picker", "aria-label": "Model", onchange: () => chosen(select.value), onpointerdown: refresh, onfocus: refresh });
  select.show = (models, name) => {
    select.hidden = models.length < 2;
    const labels = models.map(({ id, state }) => (state && state !== "loaded" ? `${id} (${STATES[state] ?? state})` : id));
    models.forEach(({ id }, index) => {
      const option = select.options[index] ?? select.appendChild(h("option"));
      if (option.value !== id) option.value = id;
      if (option.textContent !== labels[index]) option.textContent = labels[index]; // an open list stays as it is
    });
    while (select.options.length > models.length) select.lastChild.remove();
    select.value = name;
  };
  return select;
}

/** Call `show` with a text while a model is loaded for an answer, until the signal aborts or it is loaded. */
export async function watchLoading(root, signal, show) {
  while (!signal.aborted) {
    try {
      const { models } = await getJson("v1/status", { signal });
      const model = models.find(({ name }) => name === root);
      if (model === undefined || model.state === "loaded") break;
      show(`Loading ${model.name}: ${loadingText(model)}`);
    } catch {
      break; // the answer tells what is wrong
    }
    await new Promise((resolve) => setTimeout(resolve, 500));
  }
  if (!signal.aborted) show("");
}
