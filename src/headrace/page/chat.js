// The chat view: the list of conversations, the shown branch of one, and the composer.

import { getJson } from "./api.js";
import { announce, ask, download, h, icon, iconButton, number, percent } from "./dom.js";
import { generate, isRunning, stop } from "./generate.js";
import { mediumElement, messageElement } from "./message.js";
import { chatModels, defaultModel, modelPicker, watchLoading } from "./models.js";
import { editSettings } from "./settings.js";
import {
  deleteChat, exportChats, getChat, importChats, listChats, messagesOf, newChat, newMessage, onOtherTab, saveChat, saveMessage,
} from "./store.js";

const FOLLOW_PIXELS = 90;
const TITLE_LENGTH = 60;

const live = new Map(); // the answer in progress and when it is done, by its chat's id
const drafts = new Map(); // what stands in the composer, by the chat's id
let models = [{ id: "" }]; // as /v1/models lists them
let ui = null; // the elements, while the view is mounted
let chat = newChat();
let messages = new Map();
let elements = new Map();
let attached = [];
let wanted = ""; // the id of the conversation to show
let opened = null; // when the shown conversation is loaded
let learned = null; // when the server has been asked for its models

const takesMedia = (model) => model.modalities?.input.includes("image") !== false;

/** The model that a conversation uses. */
function modelOf({ settings }) {
  return models.find(({ id }) => id === settings.model) ?? models.find(({ id }) => id === defaultModel(models));
}

export async function mount(element, id) {
  if (ui === null) {
    ui = build();
    element.replaceChildren(ui.root);
    document.addEventListener("keydown", onKey);
    onOtherTab(onChangeElsewhere);
    learned = learnModels();
    showList();
  }
  ui.root.classList.remove("listing");
  if (!id || id !== chat.id) opened = open(id);
}

export function unmount() {
  keepDraft();
  document.removeEventListener("keydown", onKey);
  ui = null;
  chat = newChat();
}

async function learnModels() {
  try {
    models = await chatModels();
  } catch (error) {
    if (error.status !== 404) notice(error.message);
  }
  if (ui !== null) show();
}

/** Show a conversation of this browser; a new one without an id, or with an unknown one. */
async function open(id) {
  keepDraft();
  wanted = id;
  ui.field.value = drafts.get(id) ?? "";
  attach([]);
  const found = (id && (await getChat(id))) || newChat();
  const loaded = await load(found);
  if (ui === null || wanted !== id) return; // another view or conversation was chosen meanwhile
  [chat, messages, elements] = [found, loaded, new Map()];
  if (id && chat.id !== id) history.replaceState(null, "", "#/chat");
  ui.list.replaceChildren();
  notice("");
  show();
  ui.log.scrollTop = ui.log.scrollHeight;
  if (matchMedia("(pointer: fine)").matches) ui.field.focus();
}

/** The chat's messages, with the one in progress as it is here. */
async function load({ id }) {
  const loaded = await messagesOf(id);
  const answer = live.get(id)?.answer;
  if (answer) loaded.set(answer.id, answer);
  return loaded;
}

function keepDraft() {
  if (ui !== null) drafts.set(messages.size ? chat.id : "", ui.field.value);
}

// The tree

function childrenOf(parent) {
  return [...messages.values()].filter((each) => each.parent === parent);
}

/** From the first message to this one. */
function branchTo(id) {
  const path = [];
  const seen = new Set(); // an imported file may go in circles
  for (let each = messages.get(id); each && !seen.has(each.id); each = messages.get(each.parent)) {
    seen.add(each.id);
    path.unshift(each);
  }
  return path;
}

/** The end of the latest branch that begins with a message. */
function latestLeaf(message) {
  for (let next = message; next; next = childrenOf(next.id).at(-1)) message = next;
  return message.id;
}

async function goTo(message) {
  chat.leaf = latestLeaf(message);
  await keep(saveChat(chat));
  show();
}

// Showing

function show() {
  if (ui === null) return;
  const path = branchTo(chat.leaf);
  ui.title.textContent = chat.title || "New conversation";
  document.title = chat.title ? `${chat.title} – Headrace` : "Headrace";
  ui.empty.hidden = path.length > 0;
  ui.model.show(models, modelOf(chat).id);
  ui.hello.textContent = models[0].id ? `Chat with ${modelOf(chat).id}` : "Chat";
  ui.menuButton.hidden = !path.length;
  const shown = path.map(elementOf);
  for (const [index, each] of path.entries()) showMessage(each, shown[index]);
  if (shown.length !== ui.list.children.length || shown.some((each, index) => each !== ui.list.children[index])) ui.list.replaceChildren(...shown);
  showComposer(path);
}

function elementOf(message) {
  if (!elements.has(message.id)) elements.set(message.id, messageElement(message, actionsOf(message)));
  return elements.get(message.id);
}

function showMessage(message, element) {
  const siblings = childrenOf(message.parent);
  element.show([siblings.indexOf(message), siblings.length], live.get(chat.id)?.answer === message);
}

function showComposer(path) {
  const running = isRunning(chat.id);
  ui.send.hidden = running;
  ui.stop.hidden = !running;
  ui.attach.hidden = !takesMedia(modelOf(chat));
  const { prompt = 0, output = 0 } = path.findLast((each) => each.stats?.prompt)?.stats ?? {};
  const used = prompt + output;
  const room = modelOf(chat).max_model_len ?? 0;
  ui.gauge.hidden = !used || !room;
  ui.meter.max = room;
  ui.meter.value = used;
  ui.used.textContent = `${number(used)} of ${number(room)} tokens (${percent(used / room)})`;
}

async function showList() {
  if (ui === null) return;
  const query = ui.search.value;
  const chats = await listChats(query);
  if (ui === null || query !== ui.search.value) return;
  ui.chats.replaceChildren(...chats.map((each) => h("li", {},
    h("a", { href: `#/chat/${each.id}`, dir: "auto", class: live.has(each.id) && "running", "aria-current": each.id === chat.id && "page" }, each.title))));
  ui.none.textContent = chats.length ? "" : query ? "Nothing found." : "No conversations yet.";
}

function notice(text) {
  if (ui !== null) ui.notice.textContent = text;
}

// Doing

function actionsOf(message) {
  return {
    edit: (text) => askAgain(message, text),
    regenerate: () => answerTo(message.parent),
    branch: (step) => {
      const siblings = childrenOf(message.parent);
      goTo(siblings[siblings.indexOf(message) + step]);
    },
    answerCall: async (index, result) => {
      message.calls[index].result = result;
      await saveMessage(message);
      show();
      if (message.calls.every((call) => call.result !== undefined)) answerTo(message.id);
    },
  };
}

async function askAgain(message, text) {
  if (!text && !message.media.length) return;
  await add(newMessage(chat, message.parent, "user", { text, media: message.media }));
}

async function send() {
  await opened;
  const text = ui.field.value.trim();
  if (isRunning(chat.id) || (!text && !attached.length)) return;
  const media = attached;
  const isNew = !messages.size;
  if (isNew) chat.title = text.replace(/\s+/g, " ").slice(0, TITLE_LENGTH) || media[0].name;
  ui.field.value = "";
  drafts.delete(isNew ? "" : chat.id);
  attach([]);
  if (isNew) history.replaceState(null, "", `#/chat/${chat.id}`);
  await add(newMessage(chat, chat.leaf, "user", { text, media }));
}

async function add(message) {
  messages.set(message.id, message);
  await keep(saveMessage(message));
  await answerTo(message.id);
}

/** Generate an answer to the branch that ends with a message. It goes on while other conversations are shown. */
async function answerTo(parent) {
  const mine = chat;
  const path = branchTo(parent);
  await learned;
  const { id: model, root } = modelOf(mine);
  if (models.length > 1) mine.settings = { ...mine.settings, model };
  stop(mine.id);
  await live.get(mine.id)?.done;
  const answer = newMessage(mine, parent, "assistant", { thinking: "", calls: [], stats: {}, model });
  if (chat.id === mine.id) messages.set(answer.id, answer);
  mine.leaf = answer.id;
  mine.updated = Date.now();
  const loading = new AbortController();
  const changed = () => {
    loading.abort(); // its first chunk is here, or its error
    answer.loading = "";
    follow(answer);
  };
  const done = generate(mine, path, answer, changed).then(() => finish(mine, answer));
  live.set(mine.id, { answer, done });
  if (models.length > 1) watchLoading(root, loading.signal, (text) => {
    answer.loading = text;
    follow(answer);
  }).then(learnModels);
  show();
  if (ui !== null) ui.log.scrollTop = ui.log.scrollHeight;
  announce("Answering");
  await keep(saveChat(mine));
  showList();
}

function finish(mine, answer) {
  live.delete(mine.id);
  follow(answer);
  announce(answer.error ? "The answer failed" : answer.finish === "stopped" ? "Stopped" : `Answer: ${answer.text.slice(0, 300)}`);
  showList();
}

/** Wait for the browser's storage; without it the conversation goes on, but is lost with the tab. */
async function keep(saving) {
  await saving.catch(() => notice("This browser could not store the conversation: it will be lost with this tab."));
}

let isFollowing = false;

/** Show an answer's progress with the next frame, and stay at the end of the log if it was there. */
function follow(answer) {
  if (isFollowing) return;
  isFollowing = true;
  setTimeout(() => {
    isFollowing = false;
    if (ui === null || answer.chat !== chat.id || !elements.has(answer.id)) return;
    showMessage(answer, elements.get(answer.id));
    showComposer(branchTo(chat.leaf));
  }, 50);
}

async function onChangeElsewhere({ chat: id, isDeleted }) {
  if (isDeleted) stop(id);
  if (ui === null) return;
  showList();
  if (id !== chat.id || isRunning(id)) return;
  if (isDeleted) return leave();
  const stored = await getChat(id);
  const loaded = await load({ id });
  if (!stored || ui === null || id !== chat.id || isRunning(id)) return;
  [chat, messages, elements] = [stored, loaded, new Map()];
  show();
}

function leave() {
  chat = newChat();
  if (location.hash === "#/chat") opened = open("");
  else location.hash = "#/chat";
}

async function rename() {
  const field = h("input", { "aria-label": "Title", dir: "auto", maxlength: 200 });
  field.value = chat.title;
  if (!(await ask("Rename the conversation", field, "Rename")) || !field.value.trim()) return;
  chat.title = field.value.trim();
  await keep(saveChat(chat));
  show();
  showList();
}

async function remove() {
  const question = h("p", {}, `“${chat.title}” and its messages will be gone from this browser.`);
  if (!(await ask("Delete the conversation?", question, "Delete", "danger"))) return;
  stop(chat.id);
  await deleteChat(chat.id);
  leave();
  showList();
}

async function exportSome(chats, name) {
  download(`headrace-${name.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 40)}.json`, await exportChats(chats));
}

async function importFile(file) {
  try {
    const added = await importChats(await file.text());
    notice("");
    announce(`${added.length} conversations imported`);
    await showList();
    if (added.length) location.hash = `#/chat/${added[0].id}`;
  } catch (error) {
    notice(error.message);
  }
}

async function settings() {
  const { id, model } = { id: modelOf(chat).id, model: chat.settings.model };
  const props = await getJson(`props?model=${encodeURIComponent(id)}`).catch(() => ({}));
  const changed = await editSettings(chat.settings, props.default_generation_settings?.params ?? {});
  if (!changed) return;
  await change(model ? { ...changed, model } : changed);
}

async function change(settings) {
  chat.settings = settings;
  if (messages.size) await keep(saveChat(chat));
  show();
}

// Pictures and videos

function attach(list) {
  attached = list;
  ui.attachments.replaceChildren(...list.map((each) => h("li", {}, mediumElement(each),
    iconButton("close", `Remove ${each.name}`, () => attach(attached.filter((other) => other !== each))))));
}

function addFiles(files) {
  const usable = [...files].filter(({ type }) => /^(image|video)\//.test(type));
  notice(usable.length < files.length ? "Only pictures and videos can be attached." : "");
  attach([...attached, ...usable.map((file) => ({ name: file.name, blob: file }))]);
}

function takeFiles(event, transfer) {
  if (!transfer.files.length) return;
  event.preventDefault();
  if (takesMedia(modelOf(chat))) addFiles(transfer.files);
  else notice(`${modelOf(chat).id} takes no pictures or videos.`);
}

// Keys

function onKey(event) {
  if (event.key !== "Escape" || document.querySelector("dialog[open], :popover-open")) return;
  if (ui.root.classList.contains("listing")) ui.root.classList.remove("listing");
  else stop(chat.id);
}

function onComposerKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  const isTouch = matchMedia("(pointer: coarse)").matches;
  if (isTouch && !event.ctrlKey && !event.metaKey) return; // touch keyboards have no other way to begin a line
  event.preventDefault();
  send();
}

// The elements

function build() {
  const ui = {};
  ui.root = h("div", { class: "chat" }, sidebar(ui), h("section", { class: "conversation", "aria-label": "Conversation" }, head(ui), log(ui), composer(ui)));
  ui.root.addEventListener("dragover", (event) => event.preventDefault());
  ui.root.addEventListener("drop", (event) => takeFiles(event, event.dataTransfer));
  return ui;
}

function sidebar(ui) {
  ui.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: showList });
  ui.chats = h("ul");
  ui.none = h("p", { class: "muted", role: "status" });
  const file = h("input", { type: "file", accept: ".json,application/json", hidden: true, onchange: () => {
    if (file.files.length) importFile(file.files[0]);
    file.value = "";
  } });
  return h("aside", { "aria-label": "Conversations" },
    h("a", { class: "button primary", href: "#/chat", onclick: (event) => {
      if (location.hash !== "#/chat") return;
      event.preventDefault();
      leave();
    } }, icon("plus"), "New chat"),
    ui.search, h("nav", { "aria-label": "Conversations" }, ui.chats, ui.none),
    h("div", { class: "row" }, file,
      h("button", { type: "button", class: "quiet", onclick: () => file.click() }, "Import"),
      h("button", { type: "button", class: "quiet", onclick: async () => exportSome(await listChats(), "conversations") }, "Export all")));
}

function head(ui) {
  ui.title = h("h1", { dir: "auto" });
  ui.model = modelPicker((model) => change({ ...chat.settings, model }), learnModels);
  const menu = h("div", { popover: "auto", id: "chat-menu", class: "menu" }, ...[
    ["Rename", rename], ["Export", () => exportSome([chat], chat.title)], ["Delete", remove],
  ].map(([label, action]) => h("button", { type: "button", class: label === "Delete" ? "quiet danger" : "quiet", onclick: () => {
    menu.hidePopover();
    action();
  } }, label)));
  ui.menuButton = iconButton("more", "More about this conversation", null, { popovertarget: "chat-menu" });
  return h("header", { class: "row" },
    iconButton("list", "Conversations", () => ui.root.classList.toggle("listing"), { "data-narrow": true }),
    ui.title, ui.model, iconButton("settings", "Settings of this conversation", settings), ui.menuButton, menu);
}

function log(ui) {
  ui.list = h("div", { class: "messages" });
  ui.hello = h("h2");
  ui.empty = h("div", { class: "empty" }, ui.hello, h("p", { class: "muted" }, "Conversations are kept in this browser."));
  ui.log = h("div", { class: "log", tabindex: 0, role: "log", "aria-live": "off", "aria-label": "Messages" }, ui.empty, ui.list);
  let wasAtEnd = true;
  ui.log.onscroll = () => (wasAtEnd = ui.log.scrollHeight - ui.log.scrollTop - ui.log.clientHeight < FOLLOW_PIXELS);
  new ResizeObserver(() => {
    if (wasAtEnd) ui.log.scrollTop = ui.log.scrollHeight;
  }).observe(ui.list);
  return ui.log;
}

function composer(ui) {
  ui.attachments = h("ul", { class: "attachments", "aria-label": "Attached" });
  ui.field = h("textarea", { rows: 1, dir: "auto", placeholder: "Write a message", "aria-label": "Message",
    onkeydown: onComposerKey, onpaste: (event) => takeFiles(event, event.clipboardData) });
  const file = h("input", { type: "file", accept: "image/*,video/*", multiple: true, hidden: true, onchange: () => {
    addFiles(file.files);
    file.value = "";
  } });
  ui.attach = iconButton("picture", "Attach pictures or videos", () => file.click());
  ui.send = h("button", { class: "primary icon-only", "aria-label": "Send", title: "Send (Enter)" }, icon("send"));
  ui.stop = h("button", { type: "button", class: "primary icon-only", "aria-label": "Stop", title: "Stop (Escape)", onclick: () => stop(chat.id) }, icon("stop"));
  ui.notice = h("p", { class: "error", role: "alert" });
  ui.meter = h("meter", { min: 0, "aria-label": "Context used" });
  ui.used = h("span");
  ui.gauge = h("div", { class: "gauge muted" }, ui.meter, ui.used);
  const form = h("form", { class: "composer", onsubmit: (event) => {
    event.preventDefault();
    send();
  } }, ui.notice, h("div", { class: "box" }, ui.attachments, h("div", { class: "row" }, file, ui.attach, ui.field, ui.send, ui.stop)), ui.gauge);
  return form;
}
