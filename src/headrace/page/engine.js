// The engine view: what the server is doing, live from the event stream of its status.

import { ApiError, call, events, getJson } from "./api.js";
import { shareBar, stackedBar, timeChart } from "./charts.js";
import { announce, bytes, copy, h, number, panel, percent, seconds, table } from "./dom.js";
import { modelsPanel } from "./models.js";

const RETRY_MS = 2000;
const RECENT_S = 5; // of which figures for "now" are averages
const HIT_WINDOW_S = 60;
const LEAST_SHOWN_S = 60;
const WAITS = {
  rows: "a free row",
  memory: "memory for states",
  turn: "another request, which starts first",
  prefix: "a request that computes the same beginning",
  disk: "its state from the disk cache",
  media: "its images or videos to be encoded",
  scores: "the draft model to score its prompt",
  model: "its model to be loaded",
  step: "the step in progress",
};

const rate = (value) => number(value, value < 10 ? 1 : 0);
const clock = (time) => h("time", { datetime: new Date(time * 1000).toISOString() }, new Date(time * 1000).toLocaleTimeString());
const sum = (values) => values.reduce((total, value) => total + value, 0);

// Each part below returns [element, update], where update takes the status, the history and the status before.

function summary() {
  const list = h("dl", { class: "tiles" });
  const tile = (name, value, note = "") => h("div", {}, h("dt", {}, name), h("dd", {}, value, note && h("small", {}, ` ${note}`)));
  return [list, (status, history, before) => {
    const recent = (name) => sum(history[name].slice(-RECENT_S - 1, -1));
    const steps = recent("num_steps");
    const { device, process } = status;
    const passed = before === null ? 0 : process.uptime_s - before.process.uptime_s;
    const used = (name) => (status[name] && before[name] ? status[name].cpu_s - before[name].cpu_s : 0);
    const cpu = passed > 0 ? percent((used("process") + used("engine_process")) / passed / device.num_cores) : "–";
    list.replaceChildren(
      tile("Running", status.num_running, `of ${status.max_num_seqs} rows`),
      tile("Waiting", status.num_waiting),
      tile("Generated", rate(recent("num_output_tokens") / RECENT_S), "tokens/s"),
      tile("Prompts", rate(recent("num_prompt_tokens") / RECENT_S), "tokens/s"),
      tile("Step", steps ? rate((1000 * recent("step_s")) / steps) : "–", "ms"),
      tile("CPU", cpu, `of ${device.num_cores} cores`),
      ...(device.kind === "cpu" ? [] : [tile("GPU", device.utilization === null ? "not readable" : percent(device.utilization))]));
  }];
}

function charts() {
  const share = percent;
  const kinds = [
    [timeChart("Generated tokens/s", rate, { series: 1 }), (history) => history.num_output_tokens],
    [timeChart("Prompt tokens/s", rate, { series: 2 }), (history) => history.num_prompt_tokens],
    [timeChart("Step time", (ms) => `${rate(ms)} ms`, { series: 3 }), (history) => perStep(history, "step_s", 1000)],
    [timeChart("Rows per step", rate, { series: 4 }), (history) => perStep(history, "num_rows", 1)],
    [timeChart("Engine busy", share, { series: 5, top: 1 }), (history) => history.step_s.map((value) => Math.min(1, value))],
    [timeChart("Prompt tokens from cache, last minute", share, { series: 6, top: 1 }), hitShares],
  ];
  const element = h("div", { class: "charts" }, ...kinds.map(([[figure]]) => figure));
  return [panel("The last minutes", element), (status, history) => {
    for (const [[, update], valuesOf] of kinds) {
      const values = valuesOf(history).slice(0, -1); // the last second is in progress
      update([...Array(Math.max(0, LEAST_SHOWN_S - values.length)).fill(null), ...values], values.at(-1) ?? null);
    }
  }];
}

const perStep = (history, name, factor) =>
  history.num_steps.map((steps, index) => (steps ? (factor * history[name][index]) / steps : null));

/** The share of prompt tokens that came from the cache, in the minute up to each second. */
function hitShares(history) {
  let [asked, hit] = [0, 0];
  return history.num_lookup_tokens.map((tokens, index) => {
    asked += tokens - (history.num_lookup_tokens[index - HIT_WINDOW_S] ?? 0);
    hit += history.num_hit_tokens[index] - (history.num_hit_tokens[index - HIT_WINDOW_S] ?? 0);
    return asked ? hit / asked : null;
  });
}

function requests() {
  const list = table("Requests", ["Request", "State", "Prompt", "Output", "Tokens/s", "Age", "Action"]);
  const empty = h("p", { class: "muted" }, "No request is running or waiting.");
  const shown = new Map();
  return [panel("Requests", list.element, empty), (status, history, before) => {
    const current = requestsOf(status);
    const earlier = before === null ? new Map() : requestsOf(before);
    const passed = before === null ? 0 : status.process.uptime_s - before.process.uptime_s;
    for (const [id, [row]] of shown) {
      if (!current.has(id)) {
        row.remove();
        shown.delete(id);
      }
    }
    for (const [id, request] of current) {
      if (!shown.has(id)) {
        shown.set(id, requestRow(list.row, request));
        list.body.append(shown.get(id)[0]);
      }
      shown.get(id)[1](request, earlier.get(id), passed);
    }
    list.element.hidden = !current.size;
    empty.hidden = current.size > 0;
  }];
}

/** Those of all models by their ids. `model` is null where one model is served alone. */
function requestsOf({ requests, models: [first, ...others] }) {
  const all = requests.map((each) => ({ ...each, model: others.length ? first.name : null }));
  for (const { name, requests } of others) all.push(...requests.map((each) => ({ ...each, model: name })));
  return new Map(all.map((each) => [each.request_id, each]));
}

function requestRow(row, { request_id: id, session, model }) {
  const state = h("span");
  const progress = h("progress", { max: 1, "aria-label": "Prompt computed" });
  const [prompt, output, speed, age] = ["small", "span", "span", "span"].map((tag) => h(tag));
  const cancel = h("button", { type: "button", class: "danger", "aria-label": `Cancel ${id}`, onclick: () => cancelRequest(id, cancel) }, "Cancel");
  const name = h("span", {}, h("code", {}, id), [model, session].map((each) => each && h("small", { class: "muted" }, each)));
  const element = row(name, state, h("span", {}, progress, prompt), output, speed, age, cancel);
  return [element, (request, before, passed) => {
    const total = request.sparse?.num_dropped ? request.num_cached_tokens + request.sparse.num_kept : request.num_prompt_tokens;
    const computed = Math.min(request.num_computed_tokens, total);
    const isDecoding = request.phase === "decode";
    const prefilled = before && passed > 0 ? (request.num_computed_tokens - before.num_computed_tokens) / passed : 0;
    state.replaceChildren(h("span", { class: `badge ${request.phase}` }, request.phase),
      ...(request.waits_for ? [h("small", {}, `waits for ${WAITS[request.waits_for] ?? request.waits_for}`)] : []));
    progress.value = total ? computed / total : 0;
    prompt.textContent = `${number(computed)} of ${number(total)}${request.num_cached_tokens ? `, ${number(request.num_cached_tokens)} from cache` : ""}`;
    output.textContent = number(request.num_output_tokens);
    speed.textContent = isDecoding ? rate(request.tokens_per_s) : request.phase === "prefill" && prefilled > 0 ? `${rate(prefilled)} (prompt)` : "–";
    age.textContent = seconds(request.age_s);
  }];
}

async function cancelRequest(id, button) {
  button.disabled = true;
  try {
    await call(`v1/requests/${encodeURIComponent(id)}/cancel`, { method: "POST" });
    announce(`Cancelled ${id}`);
  } catch (error) {
    if (error.status !== 404) button.disabled = false; // 404: it has just ended
    announce(error.message);
  }
}

function memory() {
  const [bar, update] = stackedBar("Memory", bytes);
  const note = h("p", { class: "muted" });
  return [panel("Memory", bar, note), ({ memory: used, device }) => {
    const parts = [
      ["Weights", 1, used.weights_bytes + used.adapters_bytes], ["States of running sequences", 2, used.state_bytes],
      ["Checkpoints of preempted ones", 3, used.preempted_bytes], ["Prefix cache", 4, used.records_bytes],
      ["Image and video embeddings", 5, used.features_bytes], ["On the way to or from disk", 6, used.disk_bytes],
    ];
    const other = Math.max(0, used.device_bytes - sum(parts.map(([, , value]) => value)));
    parts.push(["Computing", 7, other], ["Freed, kept for reuse", 8, used.buffers_bytes]);
    const limit = used.weights_bytes + used.adapters_bytes + used.budget_bytes;
    parts.push(["Free", "free", Math.max(0, limit - sum(parts.map(([, , value]) => value)))]);
    update(parts);
    note.textContent = `Limit ${bytes(limit)} of the ${bytes(device.memory_bytes)} of ${device.name}; ${bytes(used.reserved_bytes)} of it reserved for sequences.`;
  }];
}

function ranks() {
  const list = table("Ranks", ["Rank", "Host", "Device", "Memory"]);
  const note = h("p");
  const element = panel("Ranks", note, list.element);
  return [element, ({ ranks: group }, history, before) => {
    element.hidden = group === null;
    if (group === null) return;
    const worked = before?.ranks && group.step_s > before.ranks.step_s;
    const passed = worked ? before.ranks : { collective_s: 0, step_s: 0 }; // while idle, since the start
    const steps = group.step_s - passed.step_s;
    const share = steps > 0 ? `about ${percent((group.collective_s - passed.collective_s) / steps)} of the time of steps, estimated from their times at start-up` : "no step yet";
    const each = group.num_messages ? `${bytes(group.num_message_bytes / group.num_messages)} and ${number((1e6 * group.message_s) / group.num_messages)} µs on average` : "none yet";
    note.textContent = `${group.ranks.length} ranks share the model over ${group.backend}. Collectives: ${group.num_collectives} in a forward, ${share}. Messages of rank 0: ${number(group.num_messages)}, ${each}.`;
    list.body.replaceChildren(...group.ranks.map((each) => list.row(String(each.rank), each.host, `${each.device} (${each.kind})`,
      h("span", {}, shareBar(each.used_bytes / (each.used_bytes + each.available_bytes), 1), `${bytes(each.used_bytes)} used, ${bytes(each.available_bytes)} available of ${bytes(each.memory_bytes)}`))));
  }];
}

function cache() {
  const [bar, update] = stackedBar("Bytes by place", bytes);
  const totals = h("p");
  return [panel("Prefix cache", totals, bar), ({ cache: held, memory: used }) => {
    bar.hidden = held === null;
    if (held === null) {
      totals.textContent = "It is off.";
      return;
    }
    const share = held.num_lookup_tokens ? percent(held.num_hit_tokens / held.num_lookup_tokens) : "–";
    totals.textContent = `${share} of ${number(held.num_lookup_tokens)} prompt tokens came from it since the start, in ${number(held.num_hits)} of ${number(held.num_lookups)} lookups. It holds ${number(held.num_tokens)} tokens and ${number(held.num_snapshots)} snapshots.`;
    update([
      ["Device: live states", 2, used.state_bytes], ["Device: records", 4, held.num_bytes], ["Host: on the way to or from disk", 6, used.disk_bytes],
      [held.disk ? `Disk: files, of ${bytes(held.disk.quota_bytes)}` : "Disk: off (--cache-dir)", 3, held.disk?.num_bytes ?? 0],
    ]);
  }];
}

function lookups() {
  const list = log("Where prompts parted from the prefix cache", ["Time", "Request", "From cache", "Parted at token", "Why"], "No prompt was looked up yet.",
    (each, row) => row(clock(each.time), h("code", {}, each.request_id),
      h("span", {}, shareBar(each.num_hit_tokens / each.num_prompt_tokens, 4), `${number(each.num_hit_tokens)} of ${number(each.num_prompt_tokens)}`),
      number(each.num_agreed_tokens), each.mismatch));
  return [list.element, (status) => list.show(status.cache?.lookups ?? [])];
}

function errors() {
  const list = log("Recent errors", ["Time", "Request", "Status", "Code"], "None since the start.",
    (each, row) => row(clock(each.time), h("code", {}, each.request_id), String(each.status), each.code ?? "–"));
  return [list.element, (status) => list.show(status.errors)];
}

/** A panel with a table of what happened, the latest first. */
function log(title, columns, nothing, rowOf) {
  const list = table(title, columns);
  const empty = h("p", { class: "muted" }, nothing);
  let shown = "";
  const show = (entries) => {
    list.element.hidden = !(empty.hidden = entries.length > 0);
    if (shown === (shown = JSON.stringify(entries))) return; // what is being read stays
    list.body.replaceChildren(...entries.toReversed().map((each) => rowOf(each, list.row)));
  };
  return { element: panel(title, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${title}, list` }, list.element), empty), show };
}

function drafts() {
  const note = h("p");
  const body = h("tbody");
  const bars = h("table", { class: "bars" }, h("caption", { class: "hidden" }, "Windows in which the draft at each position was accepted"), body);
  return [panel("Drafts", note, bars), ({ drafts: method, counters }) => {
    const { num_windows: windows, num_drafted: drafted, accepted_at: at } = counters.drafts;
    const accepted = sum(at);
    note.textContent = method === null ? "Speculative decoding is off, or the model has no prediction head."
      : `${drafted ? percent(accepted / drafted) : "–"} of ${number(drafted)} draft tokens were accepted: ${windows ? number(1 + accepted / windows, 2) : "–"} tokens per verified window.`;
    body.replaceChildren(...at.map((times, index) => h("tr", {}, h("th", { scope: "row" }, `Draft ${index + 1}`),
      h("td", { class: "wide" }, shareBar(times / windows, 5)), h("td", {}, percent(times / windows)), h("td", { class: "muted" }, number(times)))));
  }];
}

const copied = (text, label) => {
  const button = h("button", { type: "button", "aria-label": `Copy ${label}`, onclick: () => copy(text, button) }, "Copy");
  return button;
};

function agents() {
  const list = h("dl", { class: "addresses" });
  const clients = h("div");
  showClients(clients);
  let names = "";
  return [panel("Settings for agents", list, clients), ({ model }) => {
    if (names === (names = model.served_names.join())) return; // buttons keep their focus
    const root = new URL(".", document.baseURI).href.replace(/\/$/, "");
    const rows = [
      ["Base URL for OpenAI's API", `${root}/v1`], ["Base URL for Anthropic's API", root],
      ["Model", model.served_names[0]], ["Context in tokens", String(model.max_model_len)],
    ];
    list.replaceChildren(...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, h("code", {}, value), copied(value, name)))));
  }];
}

/** A choice of clients with their settings, as the server lists them. */
async function showClients(element) {
  const { data } = await getJson("v1/clients").catch(() => ({ data: [] }));
  if (!data.length) return;
  const shown = h("div", { "aria-live": "polite" });
  const choice = h("select", { "aria-label": "Client" }, ...data.map((client) => h("option", { value: client.id }, client.title)));
  const block = (name, text) => h("div", { class: "block" }, h("div", { class: "row" }, h("span", { class: "muted" }, name), copied(text, name)), h("pre", { tabindex: 0 }, text));
  const show = () => {
    const client = data.find((each) => each.id === choice.value);
    shown.replaceChildren(block("In one step", client.launch), ...client.files.map((file) => block(file.path, file.text)), block("Or start it with", client.command));
  };
  choice.addEventListener("change", show);
  element.append(choice, shown);
  show();
}

function startUp() {
  const list = h("ul", { class: "report" });
  return [panel("Model and start-up report", list), ({ model, version, process, status, warm_up: warm }) => {
    const state = {
      warming: [`warming up: ${warm.num_done} of ${warm.num_pieces} steps are built`],
      draining: ["shutting down: requests in progress are finished, new ones are refused"],
    }[status] ?? [];
    const lines = [`Headrace ${version}, up ${seconds(process.uptime_s)}`, ...state, ...model.report];
    while (list.childElementCount > lines.length) list.lastChild.remove();
    lines.forEach((line, index) => (list.children[index] ?? list.appendChild(h("li"))).textContent = line);
  }];
}

/** The history with an event's new seconds; null if seconds in between are missing. */
function merged(history, fresh) {
  const numKept = history === null ? 0 : fresh.start - history.start;
  if (history === null) return fresh;
  if (numKept > history.num_steps.length) return null;
  const length = Math.max(history.num_steps.length, fresh.num_steps.length);
  const joined = Object.entries(fresh).filter(([name]) => name !== "start")
    .map(([name, values]) => [name, [...history[name].slice(0, numKept), ...values]]);
  const numOld = joined[0][1].length - length;
  return { start: history.start + numOld, ...Object.fromEntries(joined.map(([name, values]) => [name, values.slice(numOld)])) };
}

/** Call `show` with each status until the signal aborts, connecting again when the stream ends. */
async function watch(signal, show, report) {
  while (!signal.aborted) {
    try {
      let [history, before] = [null, null];
      for await (const { data } of events(await call("v1/status/stream", { signal }))) {
        const status = JSON.parse(data);
        if (status.error) throw new ApiError(status.error.message);
        history = merged(history, status.history);
        if (history === null) break;
        show(status, history, before);
        report("Live");
        before = status;
      }
    } catch (error) {
      if (signal.aborted) return;
      report(error.message, true);
      if (error.status === 401) return; // the key was refused, or not given
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

let watching = null; // an AbortController
let parts = [];
let state = null;

function start() {
  watching?.abort();
  watching = null;
  if (document.hidden) return; // the server computes nothing for a page that is not seen
  watching = new AbortController();
  const show = (...event) => parts.forEach(([, update]) => update(...event));
  watch(watching.signal, show, (text, isError = false) => {
    if (state.textContent !== text) state.textContent = text;
    state.classList.toggle("error", isError);
  });
}

export function mount(element) {
  if (parts.length) return;
  state = h("span", { class: "live", role: "status" }, "Connecting …");
  const title = h("h1", {}, "Engine");
  const showTitle = ({ models }) => (title.textContent = models.length > 1 ? `Engine of ${models[0].name}` : "Engine");
  parts = [[title, showTitle], modelsPanel(), summary(), charts(), requests(), memory(), ranks(), cache(), lookups(), drafts(), errors(), agents(), startUp()];
  element.replaceChildren(h("div", { class: "engine" }, h("header", { class: "row" }, title, state), ...parts.slice(1).map(([each]) => each)));
  document.addEventListener("visibilitychange", start);
  start();
}

export function unmount() {
  document.removeEventListener("visibilitychange", start);
  watching?.abort();
  watching = null;
  parts = [];
}
