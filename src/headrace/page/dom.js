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

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    announce("Copied");
  } catch {
    button.textContent = "Can't copy";
  }
  setTimeout(() => (button.textContent = before), 1500);
}
