// Answers: a branch of messages as a request, and its stream as a message.

import { ApiError, call, events } from "./api.js";
import { dataUrl, saveMessage } from "./store.js";

const SAVE_MS = 1000;

const running = new Map(); // by the chat's id

export const isRunning = (chatId) => running.has(chatId);

export const stop = (chatId) => running.get(chatId)?.abort();

/** Sampling settings of a chat that are fields of the request. */
export const SAMPLING = {
  temperature: { label: "Temperature", min: 0, max: 2, step: 0.05 },
  top_p: { label: "Top p", min: 0.01, max: 1, step: 0.01 },
  top_k: { label: "Top k", min: 0, step: 1 },
  min_p: { label: "Min p", min: 0, max: 1, step: 0.01 },
  repetition_penalty: { label: "Repetition penalty", min: 0.5, max: 2, step: 0.01 },
  max_tokens: { label: "Most tokens of an answer", min: 1, step: 1 },
  seed: { label: "Seed", step: 1 },
};

/** Fill `answer` with what the model says after the messages of `path`. `changed` is called after each change. Never throws. */
export async function generate(chat, path, answer, changed) {
  const controller = new AbortController();
  running.set(chat.id, controller);
  const begun = performance.now();
  let saved = begun;
  try {
    await keep(answer);
    const body = await requestBody(chat, path, answer.model);
    const response = await call("v1/chat/completions", { method: "POST", body, signal: controller.signal });
    let isComplete = false;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") {
        isComplete = true;
        break;
      }
      take(answer, JSON.parse(data), performance.now() - begun);
      changed();
      if (performance.now() - saved > SAVE_MS) {
        saved = performance.now();
        await keep(answer);
      }
    }
    if (!isComplete) throw new ApiError("The connection ended before the answer did.");
  } catch (error) {
    answer.finish = controller.signal.aborted ? "stopped" : "error";
    if (answer.finish === "error") answer.error = error instanceof ApiError ? error.message : "The connection broke before the answer was complete.";
  }
  running.delete(chat.id);
  await keep(answer);
  changed();
}

/** Without the browser's storage the chat goes on. */
const keep = (answer) => saveMessage(answer).catch(() => {});

function take(answer, chunk, ms) {
  if (chunk.error) throw new ApiError(chunk.error.message);
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  const thinking = delta.reasoning_content ?? delta.reasoning ?? "";
  if (thinking || delta.content || delta.tool_calls) answer.stats.first_ms ??= ms;
  if (thinking) answer.stats.thought_ms = ms;
  answer.thinking += thinking;
  answer.text += delta.content ?? "";
  for (const { index, id, function: part } of delta.tool_calls ?? []) {
    answer.calls[index] ??= { id, name: part.name, arguments: "" };
    answer.calls[index].arguments += part.arguments ?? "";
  }
  if (choice?.finish_reason) answer.finish = choice.finish_reason;
  answer.progress = chunk.prompt_progress;
  if (chunk.usage) takeUsage(answer.stats, chunk.usage, ms);
}

function takeUsage(stats, usage, ms) {
  if (usage.completion_tokens > (stats.output ?? 0)) stats.last_ms = ms;
  stats.prompt = usage.prompt_tokens;
  stats.output = usage.completion_tokens;
  stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  stats.accepted = usage.completion_tokens_details?.accepted_prediction_tokens ?? 0;
}

async function requestBody(chat, path, model) {
  const { system, thinking, tools, ...sampling } = chat.settings;
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const each of path) messages.push(...(await wireMessages(each)));
  const body = { model, messages, stream: true, return_progress: true,
    stream_options: { include_usage: true, continuous_usage_stats: true } };
  for (const name of Object.keys(SAMPLING)) if (Number.isFinite(sampling[name])) body[name] = sampling[name];
  if (thinking) body.enable_thinking = thinking === "on";
  if (tools) body.tools = parseTools(tools);
  return body;
}

/** Throws ApiError: an imported conversation may have any text there. */
function parseTools(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError("The tools in this conversation's settings are not JSON.");
  }
}

/** The message, and the results of its calls. */
async function wireMessages(message) {
  if (message.role === "user") return [{ role: "user", content: await userContent(message) }];
  const calls = message.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  const wire = { role: "assistant", content: message.text };
  if (message.thinking) wire.reasoning_content = message.thinking;
  if (calls.length) wire.tool_calls = calls;
  const results = message.calls.filter((each) => each.result !== undefined);
  return [wire, ...results.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }))];
}

async function userContent({ text, media }) {
  if (!media.length) return text;
  const parts = await Promise.all(media.map(async ({ blob }) => {
    const kind = blob.type.startsWith("video/") ? "video_url" : "image_url";
    return { type: kind, [kind]: { url: await dataUrl(blob) } };
  }));
  return text ? [...parts, { type: "text", text }] : parts;
}
