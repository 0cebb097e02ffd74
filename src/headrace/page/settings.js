// The settings of a conversation: system prompt, sampling, thinking, tools.

import { ask, h } from "./dom.js";
import { SAMPLING } from "./generate.js";

/** Show a dialog for settings. Resolves with the changed ones, or null. `defaults`: the model's, for sampling. */
export async function editSettings(settings, defaults) {
  const fields = {};
  const labelled = (name, label, field) => {
    fields[name] = field;
    field.value = settings[name] ?? "";
    field.ariaLabel = label; // the label element's own text has the options of a choice
    return h("label", {}, label, field);
  };
  const choice = (options) => h("select", {}, options.map(([value, label]) => h("option", { value }, label)));
  const tools = h("textarea", { rows: 4, class: "mono", spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": …}}]' });
  tools.oninput = () => tools.setCustomValidity(isToolList(tools.value) ? "" : "A JSON list of tools, as in OpenAI's API");
  const content = h("div", { class: "settings" },
    labelled("system", "System prompt", h("textarea", { rows: 4, dir: "auto" })),
    labelled("thinking", "Thinking", choice([["", "As the model does"], ["on", "On"], ["off", "Off"]])),
    h("div", { class: "grid" }, Object.entries(SAMPLING).map(([name, { label, min, max, step }]) => labelled(name, label,
      h("input", { type: "number", min, max, step: step < 1 ? "any" : step, placeholder: defaults[name] ?? "default" })))),
    labelled("tools", "Tools (JSON)", tools),
    h("p", { class: "muted" }, "The page runs no tools: it shows a call, and you give its result."));
  if (!(await ask("Settings of this conversation", content, "Save"))) return null;
  const changed = {};
  for (const [name, field] of Object.entries(fields)) {
    const value = field.value.trim();
    if (value) changed[name] = name in SAMPLING ? Number(value) : value;
  }
  return changed;
}

function isToolList(text) {
  if (!text.trim()) return true;
  try {
    return Array.isArray(JSON.parse(text));
  } catch {
    return false;
  }
}
