// Making elements. Text only ever becomes text: there is no way to pass HTML.

/** An element with properties (`class`, `data-…`, `aria-…` and others as attributes, `on…` as listeners) and children. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Tell users of screen readers, without moving their focus. */
export function announce(text) {
  document.getElementById("announce").textContent = text;
}

export const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });

export const percent = (share) => `${number(share * 100)} %`;

export const bytes = (value) => {
  const unit = ["B", "kB", "MB", "GB", "TB"][Math.min(4, Math.floor(Math.log10(Math.max(1, value)) / 3))];
  return `${number(value / { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 }[unit], unit === "B" ? 0 : 1)} ${unit}`;
};

export const seconds = (value) => (value < 60 ? `${number(value, value < 10 ? 1 : 0)} s`
  : value < 3600 ? `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`
    : `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`);

export const panel = (title, ...children) => h("section", { class: "panel", "aria-label": title }, h("h2", {}, title), ...children);

/** A table that becomes a list of cards on a narrow screen, where its roles have to be given again. */
export function table(caption, columns) {
  const body = h("tbody", { role: "rowgroup" });
  const head = h("tr", { role: "row" }, ...columns.map((name) => h("th", { scope: "col", role: "columnheader" }, name)));
  const cells = (...contents) => contents.map((content, index) => h("td", { role: "cell", "data-name": columns[index] }, content));
  const element = h("table", { class: "cards", role: "table" },
    h("caption", { class: "hidden" }, caption), h("thead", { role: "rowgroup" }, head), body);
  return { element, body, row: (...contents) => h("tr", { role: "row" }, ...cells(...contents)) };
}

const ICONS = {
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  picture: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15 9h.01",
  settings: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
  more: "M5 11.5v1M12 11.5v1M19 11.5v1",
  list: "M4 6h16M4 12h16M4 18h10",
  copy: "M9 9h11v11H9zM5 15V4h11",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  retry: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  back: "M14 6l-6 6 6 6",
  next: "M10 6l6 6-6 6",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  light: "M8 12a4 4 0 1 0 8 0 4 4 0 1 0-8 0M12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6 7 7M17 17l1.4 1.4M5.6 18.4 7 17M17 7l1.4-1.4",
  dark: "M19 14.5A7.5 7.5 0 0 1 9.5 5a7.5 7.5 0 1 0 9.5 9.5z",
  close: "M6 6l12 12M18 6L6 18",
};

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" })) svg.setAttribute(key, value);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button of an icon alone; `label` is its name and tooltip. */
export const iconButton = (name, label, onclick, properties = {}) =>
  h("button", { type: "button", class: "quiet icon-only", "aria-label": label, title: label, onclick, ...properties }, icon(name));

/** Copy a text and say so in the button for a moment. */
export async function copy(text, button) {
  const isCopied = await copyText(text);
  announce(isCopied ? "Copied" : "Could not copy");
  button.dataset.copied = isCopied ? "Copied" : "Failed";
  setTimeout(() => delete button.dataset.copied, 1500);
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  // Pages that came over plain HTTP from another machine have no clipboard.
  const field = h("textarea", { class: "hidden" });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}

/** Ask in a dialog, whose one action is `label`. Resolves with whether it was chosen; Escape and Cancel decline. */
export function ask(title, content, label, kind = "primary") {
  const cancel = h("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel");
  const form = h("form", { method: "dialog" }, h("h2", {}, title), content,
    h("div", { class: "row end" }, cancel, h("button", { class: kind, value: "yes" }, label)));
  const dialog = h("dialog", { "aria-label": title }, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    };
  });
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
