// Conversations in this browser (IndexedDB). A chat's messages are a tree by `parent`; its `leaf` ends the shown branch.

const channel = new BroadcastChannel("headrace");
let opening = null;

/** Call with `{chat, isDeleted}` after another tab has changed a chat. */
export const onOtherTab = (listener) => (channel.onmessage = (event) => listener(event.data));

/** Unlike crypto.randomUUID, also for pages that came over plain HTTP. */
export const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function stores(mode = "readonly") {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("headrace", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("chats", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("chat", "chat");
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  const transaction = (await opening).transaction(["chats", "messages"], mode);
  return [transaction.objectStore("chats"), transaction.objectStore("messages")];
}

export function newChat() {
  return { id: newId(), title: "", created: Date.now(), updated: Date.now(), leaf: null, settings: {} };
}

export function newMessage(chat, parent, role, fields = {}) {
  return { id: newId(), chat: chat.id, parent, role, created: Date.now(), text: "", media: [], ...fields };
}

/** All chats, the latest first; with a query, those whose title or messages have it. */
export async function listChats(query = "") {
  const [chats, messages] = await stores();
  const all = (await done(chats.getAll())).sort((a, b) => b.updated - a.updated);
  const wanted = query.trim().toLowerCase();
  if (!wanted) return all;
  const found = new Set();
  for (const each of await done(messages.getAll())) if (each.text.toLowerCase().includes(wanted)) found.add(each.chat);
  return all.filter((chat) => found.has(chat.id) || chat.title.toLowerCase().includes(wanted));
}

export const getChat = async (id) => done((await stores())[0].get(id));

/** The chat's messages by id, in the order of their making. */
export async function messagesOf(id) {
  const found = await done((await stores())[1].index("chat").getAll(id));
  return new Map(found.sort((a, b) => a.created - b.created).map((each) => [each.id, each]));
}

export async function saveChat(chat) {
  await done((await stores("readwrite"))[0].put(chat));
  channel.postMessage({ chat: chat.id });
}

export async function saveMessage(message) {
  await done((await stores("readwrite"))[1].put(message));
  channel.postMessage({ chat: message.chat });
}

export async function deleteChat(id) {
  const [chats, messages] = await stores("readwrite");
  chats.delete(id);
  for (const key of await done(messages.index("chat").getAllKeys(id))) messages.delete(key);
  await new Promise((resolve) => (messages.transaction.oncomplete = resolve));
  channel.postMessage({ chat: id, isDeleted: true });
}

/** A Blob as a `data:` URL. */
export const dataUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/** Chats with their messages as one JSON text; pictures and videos are data: URLs. */
export async function exportChats(chats) {
  const exported = [];
  for (const chat of chats) {
    const messages = [];
    for (const each of (await messagesOf(chat.id)).values()) {
      const media = await Promise.all(each.media.map(async ({ name, blob }) => ({ name, url: await dataUrl(blob) })));
      messages.push({ ...each, media });
    }
    exported.push({ ...chat, messages });
  }
  return JSON.stringify({ format: "headrace-chats", version: 1, chats: exported }, null, 1);
}

/** Add the chats of an exported file under new ids. Returns them. Throws Error for anything else. */
export async function importChats(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (file?.format !== "headrace-chats" || !Array.isArray(file.chats)) throw new Error("The file holds no exported conversations.");
  const read = file.chats.map(readChat);
  const [chats, messages] = await stores("readwrite");
  for (const { chat, tree } of read) {
    chats.put(chat);
    for (const each of tree) messages.put(each);
  }
  await new Promise((resolve, reject) => {
    chats.transaction.oncomplete = resolve;
    chats.transaction.onerror = () => reject(chats.transaction.error);
  });
  for (const { chat } of read) channel.postMessage({ chat: chat.id });
  return read.map(({ chat }) => chat);
}

const text = (value) => (typeof value === "string" ? value : "");
const time = (value) => (Number.isFinite(value) ? value : Date.now());
const plain = (value) => (value !== null && typeof value === "object" && !Array.isArray(value) ? value : {});

/** Only known fields of the right types: the file may be anyone's. */
function readChat(given) {
  given = plain(given);
  const list = Array.isArray(given.messages) ? given.messages.map(plain) : [];
  const ids = new Map(list.map((each) => [each.id, newId()]));
  const chat = {
    ...newChat(), title: text(given.title).slice(0, 200), created: time(given.created), updated: time(given.updated),
    leaf: ids.get(given.leaf) ?? null, settings: readSettings(plain(given.settings)),
  };
  const tree = list.filter((each) => each.role === "user" || each.role === "assistant").map((each) => ({
    ...newMessage(chat, ids.get(each.parent) ?? null, each.role), id: ids.get(each.id), created: time(each.created),
    text: text(each.text), thinking: text(each.thinking), model: text(each.model), finish: text(each.finish), error: text(each.error),
    media: (Array.isArray(each.media) ? each.media : []).map(plain).map(readMedium).filter(Boolean),
    calls: (Array.isArray(each.calls) ? each.calls : []).map(plain).map((call) => ({
      id: text(call.id), name: text(call.name), arguments: text(call.arguments), ...(typeof call.result === "string" && { result: call.result }),
    })),
    stats: Object.fromEntries(Object.entries(plain(each.stats)).filter(([, value]) => Number.isFinite(value))),
  }));
  return { chat, tree };
}

const readSettings = (given) => Object.fromEntries(
  Object.entries(given).filter(([, value]) => typeof value === "string" || Number.isFinite(value)),
);

function readMedium({ name, url }) {
  const match = /^data:((?:image|video)\/[\w.+-]+);base64,([A-Za-z0-9+/=]*)$/.exec(text(url));
  if (match === null) return null;
  const bytes = Uint8Array.from(atob(match[2]), (character) => character.charCodeAt(0));
  return { name: text(name), blob: new Blob([bytes], { type: match[1] }) };
}
