// Charts as SVG and bars as elements. Each has its numbers as text, too.

import { h } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 72;

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The next of 1, 2, 5, 10, 20, … */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((each) => each * power >= value * 0.999) * power;
}

/** A series over time: one value a second, the oldest first, null where there is none. Returns [element, update].
 * format: a value as text. top: the scale's end, if it is fixed. */
export function timeChart(title, format, { top = null, series = 1 } = {}) {
  const line = svg("path", { class: "line" });
  const area = svg("path", { class: "area" });
  const cursor = svg("path", { class: "cursor" });
  const grid = svg("path", { class: "grid", d: `M0 0.5H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - 0.5}H${WIDTH}` });
  const image = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, grid, area, line, cursor);
  const now = h("strong");
  const scale = h("span", { class: "scale", "aria-hidden": "true" });
  const start = h("span");
  const element = h("figure", { class: `chart series-${series}` },
    h("figcaption", {}, h("span", {}, title), now),
    h("div", { class: "plot" }, image, scale),
    h("p", { class: "times", "aria-hidden": "true" }, start, h("span", {}, "now")));
  let shown = { values: [], current: "" };
  let pointed = null; // a share of the width
  const point = () => {
    const { values, current } = shown;
    const index = pointed === null ? -1 : Math.round(pointed * (values.length - 1));
    cursor.setAttribute("d", index < 0 ? "" : `M${(index / (values.length - 1)) * WIDTH} 0V${HEIGHT}`);
    const value = values[index] ?? null;
    now.textContent = index < 0 ? current : `${values.length - 1 - index} s ago: ${value === null ? "–" : format(value)}`;
  };
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    pointed = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    point();
  });
  image.addEventListener("pointerleave", () => {
    pointed = null;
    point();
  });
  /** latest: what counts as the value now. */
  return [element, (values, latest) => {
    const known = values.filter((value) => value !== null);
    const most = top ?? roundUp(Math.max(0, ...known));
    const [stroke, fill] = paths(values, most);
    line.setAttribute("d", stroke);
    area.setAttribute("d", fill);
    scale.textContent = format(most);
    start.textContent = `${Math.round(values.length / 60)} min ago`;
    shown = { values, current: latest === null ? "–" : format(latest) };
    const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
    image.setAttribute("aria-label", known.length
      ? `${title}: now ${shown.current}; in the last ${values.length} seconds ${format(mean)} on average, ${format(Math.max(...known))} at most`
      : `${title}: nothing in the last ${values.length} seconds`);
    point();
  }];
}

/** The line and the area below it, with gaps where values are null. */
function paths(values, most) {
  const x = (index) => ((index / Math.max(1, values.length - 1)) * WIDTH).toFixed(1);
  const y = (value) => (HEIGHT - 1 - Math.min(1, value / most) * (HEIGHT - 3)).toFixed(1);
  let stroke = "";
  let fill = "";
  for (let start = 0; start < values.length; start++) {
    if (values[start] === null) continue;
    let end = start;
    while (end + 1 < values.length && values[end + 1] !== null) end++;
    const points = values.slice(start, end + 1).map((value, offset) => `${x(start + offset)} ${y(value)}`);
    // A lone value would have no length.
    stroke += `M${points.join("L")}${start === end ? "h1" : ""}`;
    fill += `M${x(start)} ${HEIGHT}L${points.join("L")}L${x(end)} ${HEIGHT}Z`;
    start = end;
  }
  return [stroke, fill];
}

/** Parts of a whole as one bar and a table of them. Returns [element, update] for [name, series, value] lists. */
export function stackedBar(caption, format) {
  const bar = h("div", { class: "stack", role: "img" });
  const body = h("tbody");
  const element = h("div", {}, bar, h("table", { class: "legend" }, h("caption", { class: "hidden" }, caption), body));
  return [element, (parts) => {
    const whole = parts.reduce((sum, [, , value]) => sum + value, 0) || 1;
    const share = (value) => `${((100 * value) / whole).toFixed(1)} %`;
    bar.replaceChildren(...parts.filter(([, , value]) => value > 0).map(([name, series, value]) => {
      const part = h("span", { class: `series-${series}`, title: `${name}: ${format(value)}` });
      part.style.flexGrow = value / whole;
      return part;
    }));
    bar.setAttribute("aria-label", `${caption}: ${parts.map(([name, , value]) => `${name} ${format(value)}`).join(", ")}`);
    body.replaceChildren(...parts.map(([name, series, value]) => h("tr", {},
      h("th", { scope: "row" }, h("span", { class: `swatch series-${series}` }), name),
      h("td", {}, format(value)), h("td", { class: "muted" }, share(value)))));
  }];
}

/** A bar of a share from 0 to 1; the number is to be given beside it. */
export function shareBar(share, series = 1) {
  const fill = h("span", { class: `series-${series}` });
  fill.style.width = `${Math.min(100, Math.max(0, 100 * share))}%`;
  return h("span", { class: "share", "aria-hidden": "true" }, fill);
}
