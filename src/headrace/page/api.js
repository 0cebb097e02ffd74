// The server's public routes: requests with the key, errors, event streams, and Markdown.

const KEY = "headrace.key"; // in sessionStorage: gone with the tab

/** An error that the server answered with. status 0: no answer came. */
export class ApiError extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** The response to a request, once its status is good. Asks for the key where the server wants one. Throws ApiError. */
export async function call(path, { method = "GET", body, signal, keepalive } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = {};
    if (key !== null) headers.authorization = `Bearer ${key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    const response = await fetch(path, {
      method, headers, signal, keepalive, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
    }).catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer. Is it still running?");
    });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    // Another request may have got the right key meanwhile.
    if (key === sessionStorage.getItem(KEY) && !(await askForKey(key === null ? "" : error.message))) throw error;
  }
}

export const getJson = async (path, options) => (await call(path, options)).json();

async function errorOf(response) {
  const text = await response.text();
  let error;
  try {
    error = JSON.parse(text).error;
  } catch {
    error = null; // a proxy's page
  }
  return new ApiError(error ? sentence(error.message) : `The server answered ${response.status}`, response.status, error?.param);
}

/** With a capital letter, unless it begins with a field's path. */
const sentence = (message) => message.replace(/^[a-z]+(?= )/, (word) => word.charAt(0).toUpperCase() + word.slice(1));

let asking = null;

/** Whether the user gave a key. All requests that need one wait for the same question. */
function askForKey(message) {
  asking ??= showKeyDialog(message).finally(() => (asking = null));
  return asking;
}

function showKeyDialog(message) {
  const dialog = document.getElementById("key");
  const field = document.getElementById("key-field");
  document.getElementById("key-error").textContent = message && `${message}. Please check it.`;
  field.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const form = dialog.querySelector("form");
    form.onsubmit = (event) => {
      event.preventDefault();
      dialog.returnValue = "given";
      dialog.close("given");
    };
    dialog.querySelector("[value=cancel]").onclick = () => dialog.close("cancel");
    dialog.onclose = () => {
      const isGiven = dialog.returnValue === "given";
      if (isGiven) sessionStorage.setItem(KEY, field.value.trim());
      field.value = dialog.returnValue = "";
      resolve(isGiven);
    };
  });
}

/** The data of a response's server-sent events, as `{event, data}` with data as text. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const parsed = parseEvent(block);
        if (parsed !== null) yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a reader that leaves early ends the request
  }
}

function parseEvent(block) {
  let event = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line);
    if (name === "event") event = value;
    if (name === "data") data.push(value);
  }
  return data.length ? { event, data: data.join("\n") } : null;
}

// The one place where text becomes HTML: what the server's Markdown route made of it, with all HTML in it escaped.
const policy = window.trustedTypes?.createPolicy("markdown", { createHTML: (html) => html }) ?? { createHTML: (html) => html };

/** Markdown as a DocumentFragment. Throws ApiError. */
export async function markdown(text, signal) {
  const response = await call("v1/markdown", { method: "POST", body: { text }, signal });
  const template = document.createElement("template");
  template.innerHTML = policy.createHTML(await response.text());
  return template.content;
}
