// One message as an element that follows it while it grows.

import { markdown } from "./api.js";
import { announce, copy, h, iconButton, number, percent } from "./dom.js";

const RENDER_MS = 220;
const RENDER_COST = 4; // at most a fifth of the time goes into rendering, however long the text is

/**
 * The element of a message. `actions`: edit(text), regenerate(), branch(step), answerCall(index, text).
 * It has `show(branches)`, to call after each change: where it stands among its alternatives, as [index, number].
 */
export function messageElement(message, actions) {
  return message.role === "user" ? userElement(message, actions) : answerElement(message, actions);
}

function userElement(message, actions) {
  const text = h("div", { class: "text", dir: "auto" }, message.text);
  const body = h("div", { class: "bubble" }, message.media.map(mediumElement), message.text ? text : null);
  const foot = h("div", { class: "actions" });
  const article = h("article", { class: "message user", "aria-label": "You" }, body, foot);
  article.show = (branches) => {
    foot.replaceChildren(
      ...branchButtons(branches, actions),
      copyButton(() => message.text),
      iconButton("edit", "Edit and ask again", () => edit(message, body, foot, actions)),
    );
  };
  return article;
}

function edit(message, body, foot, actions) {
  const field = h("textarea", { "aria-label": "Edited message", rows: 3, dir: "auto" });
  field.value = message.text;
  const leave = () => {
    form.remove();
    body.hidden = foot.hidden = false;
    foot.querySelector("button:last-child").focus();
  };
  const form = h("form", { class: "edit" }, field, h("div", { class: "row end" },
    h("button", { type: "button", class: "quiet", onclick: leave }, "Cancel"), h("button", { class: "primary" }, "Ask again")));
  form.onsubmit = (event) => {
    event.preventDefault();
    leave();
    actions.edit(field.value.trim());
  };
  form.onkeydown = (event) => {
    if (event.key === "Escape") leave();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    if (event.key === "Escape") event.stopPropagation();
  };
  body.hidden = foot.hidden = true;
  body.after(form);
  field.focus();
}

export function mediumElement({ name, blob }) {
  const url = URL.createObjectURL(blob);
  return blob.type.startsWith("video/")
    ? h("video", { src: url, controls: true, "aria-label": name })
    : h("img", { src: url, alt: name || "Picture", title: name });
}

function answerElement(message, actions) {
  const summary = h("summary");
  const thoughts = h("div", { class: "text", dir: "auto" });
  const thinking = h("details", { class: "thinking", hidden: true }, summary, thoughts);
  const prose = h("div", { class: "prose", dir: "auto" });
  const calls = h("div", { class: "calls" });
  const state = h("p", { class: "state" });
  const error = h("p", { class: "error", role: "alert" });
  const stats = h("p", { class: "stats" });
  const buttons = h("div", { class: "actions" });
  const article = h("article", { class: "message answer", "aria-label": `Answer of ${message.model || "the model"}` },
    thinking, prose, calls, state, error, h("footer", {}, stats, buttons));
  const render = renderer(prose, () => message.text);
  prose.addEventListener("click", (event) => {
    const button = event.target.closest("button.copy");
    if (button) copy(button.closest(".code").querySelector("code").textContent, button);
  });

  article.show = (branches, isRunning) => {
    article.classList.toggle("running", isRunning);
    article.setAttribute("aria-busy", isRunning);
    thinking.hidden = !message.thinking;
    if (thoughts.textContent !== message.thinking) thoughts.textContent = message.thinking;
    summary.textContent = thinkingTitle(message, isRunning);
    render(isRunning);
    showCalls(calls, message, actions, isRunning);
    state.textContent = stateText(message, isRunning);
    error.textContent = message.error ?? "";
    stats.textContent = statsText(message.stats);
    if (isRunning) buttons.replaceChildren();
    else buttons.replaceChildren(...branchButtons(branches, actions), copyButton(() => message.text),
      iconButton("retry", "Answer again", actions.regenerate));
  };
  return article;
}

/** Shows text as Markdown: now and then while it grows, and once more at its end. */
function renderer(element, text) {
  let shown = "";
  let isBusy = false;
  return async function render(isRunning) {
    const next = text();
    element.setAttribute("aria-busy", next !== shown);
    if (isBusy || next === shown) return;
    isBusy = true;
    const begun = performance.now();
    if (!element.firstChild) element.append(h("p", { class: "text" }, next)); // until it is rendered
    try {
      patch(element, await markdown(next));
    } catch {
      element.replaceChildren(h("p", { class: "text" }, next));
    }
    shown = next;
    element.setAttribute("aria-busy", next !== text());
    setTimeout(() => {
      isBusy = false;
      render(isRunning);
    }, isRunning ? Math.max(RENDER_MS, RENDER_COST * (performance.now() - begun)) : 0);
  };
}

/** Replace children from the first that differs on, so that selections and scrolled code above it stay. */
function patch(element, fragment) {
  const fresh = [...fragment.childNodes];
  let index = 0;
  while (index < fresh.length && element.childNodes[index]?.isEqualNode(fresh[index])) index += 1;
  while (element.childNodes.length > index) element.lastChild.remove();
  element.append(...fresh.slice(index));
}

function thinkingTitle({ text, calls, stats }, isRunning) {
  if (isRunning && !text && !calls.length) return "Thinking…";
  const seconds = (stats.thought_ms - stats.first_ms) / 1000;
  return seconds >= 0 ? `Thought for ${number(Math.max(seconds, 0.1), seconds < 10 ? 1 : 0)} s` : "Thoughts";
}

function stateText({ text, thinking, calls, finish, progress, loading }, isRunning) {
  if (isRunning && !text && !thinking && !calls.length) {
    if (loading) return loading;
    return progress?.total ? `Reading the prompt: ${percent(progress.processed / progress.total)}` : "Reading the prompt…";
  }
  if (isRunning) return "";
  return { stopped: "Stopped.", length: "Ended at its limit of tokens.", "": "Interrupted." }[finish ?? ""] ?? "";
}

/** What usage and the clock say of an answer. */
export function statsText({ first_ms, last_ms, output, prompt, cached, accepted }) {
  if (!output) return "";
  const parts = [];
  if (last_ms > first_ms && output > 1) parts.push(`${number(((output - 1) * 1000) / (last_ms - first_ms), 1)} tokens/s`);
  parts.push(`${number(output)} tokens`);
  if (first_ms !== undefined) parts.push(`first after ${number(first_ms / 1000, 2)} s`);
  if (prompt) parts.push(`${percent(cached / prompt)} reused`);
  parts.push(`${percent(accepted / output)} drafted`);
  return parts.join(" · ").replaceAll(" %", "\u00a0%");
}

function showCalls(element, message, actions, isRunning) {
  const { calls } = message;
  while (element.children.length < calls.length) element.append(callElement(calls[element.children.length], element.children.length, actions));
  calls.forEach((call, index) => element.children[index].show(isRunning));
}

function callElement(call, index, actions) {
  const code = h("code", { dir: "auto" });
  const result = h("div", { class: "result" });
  const section = h("section", { class: "call", "aria-label": `Call of ${call.name}` },
    h("p", { class: "call-name" }, "Call of ", h("b", {}, call.name)), h("pre", { tabindex: 0 }, code), result);
  section.show = (isRunning) => {
    const text = pretty(call.arguments);
    if (code.textContent !== text) code.textContent = text;
    if (isRunning || section.dataset.shown === String(call.result)) return;
    section.dataset.shown = String(call.result);
    if (call.result === undefined) result.replaceChildren(resultForm(call, index, actions));
    else result.replaceChildren(h("p", { class: "call-name" }, "Result"), h("pre", { tabindex: 0 }, h("code", {}, call.result)));
  };
  return section;
}

function resultForm(call, index, actions) {
  const field = h("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "What the tool returned" });
  const form = h("form", { class: "row" }, field, h("button", {}, "Send result"));
  form.onsubmit = (event) => {
    event.preventDefault();
    actions.answerCall(index, field.value);
  };
  return form;
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not complete yet
  }
}

function branchButtons([index, count], actions) {
  if (count < 2) return [];
  const go = (step) => () => {
    actions.branch(step);
    announce(`Version ${index + 1 + step} of ${count}`);
  };
  return [
    iconButton("back", "Earlier version", go(-1), { disabled: index === 0 }),
    h("span", { class: "branch" }, h("span", { class: "hidden" }, "Version "), `${index + 1}/${count}`),
    iconButton("next", "Later version", go(1), { disabled: index === count - 1 }),
  ];
}

function copyButton(text) {
  return iconButton("copy", "Copy", (event) => copy(text(), event.currentTarget));
}
