// The box in which a prompt is tried: an ordinary client of this server, with streaming and what its timing was.

import { byId, element, keyed, setText } from "./dom.js";
import { milliseconds, plural } from "./format.js";
import { request } from "./server.js";

const PHASES = ["read", "queued", "prefill", "handoff", "decode"];
const MOST_CHARS = 200000;
let stopping = null;

/** Have the form do what it says. */
export function prepareTryout() {
  byId("try").addEventListener("submit", (submitted) => {
    submitted.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", () => stopping?.abort());
  byId("prompt").addEventListener("keydown", (pressed) => {
    if (pressed.key === "Enter" && (pressed.ctrlKey || pressed.metaKey)) byId("try").requestSubmit();
  });
}

/** What the model can. */
export function offerTryout(report) {
  byId("mode-field").hidden = !report.has_chats;
  byId("max-tokens").max = report.max_model_len;
}

async function send() {
  const output = byId("output");
  stopping = new AbortController();
  busy(true);
  output.hidden = false;
  output.textContent = "";
  byId("phases").hidden = true;
  setText(byId("outcome"), "waiting for the first token");
  let end = { text: "the stream ended early" };
  try {
    const response = await request(...asked(), stopping.signal);
    for await (const event of events(response)) end = take(event, output) ?? end;
  } catch (error) {
    end = { text: error.name === "AbortError" ? "stopped" : `failed: ${error.message}`, failed: error.name !== "AbortError" };
  }
  setText(byId("outcome"), end.text);
  byId("outcome").classList.toggle("failed", Boolean(end.failed));
  if (end.timing) showTiming(end.timing);
  busy(false);
}

function busy(isBusy) {
  byId("send").disabled = isBusy;
  byId("stop").disabled = !isBusy;
}

/** Where to, and what. */
function asked() {
  const isChat = byId("mode").value === "chat" && !byId("mode-field").hidden;
  const text = byId("prompt").value;
  const body = {
    ...(isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  return [isChat ? "v1/chat/completions" : "v1/completions", body];
}

/** Each event of a stream as it comes; raises what the server says went wrong. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ") || part === "data: [DONE]") continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** Append its text; the last one tells how it ended. */
function take(event, output) {
  const choice = event.choices[0];
  if (choice) {
    if (byId("outcome").textContent.startsWith("waiting")) setText(byId("outcome"), "streaming");
    const text = choice.text ?? (choice.delta?.reasoning_content ?? "") + (choice.delta?.content ?? "");
    const follows = output.scrollTop + output.clientHeight >= output.scrollHeight - 8;
    if (output.textContent.length < MOST_CHARS) output.append(text);
    if (follows) output.scrollTop = output.scrollHeight;
  }
  if (!event.usage) return null;
  const { prompt_tokens: numPrompt, completion_tokens: numOut, prompt_tokens_details: details } = event.usage;
  const cached = details?.cached_tokens ? `, ${plural(details.cached_tokens, "token")} of them found` : "";
  return { text: `${plural(numOut, "token")} after ${plural(numPrompt, "prompt token")}${cached}`, timing: event.timing?.[0] };
}

function showTiming(timing) {
  const box = byId("phases");
  const parts = PHASES.map((phase) => ({ phase, ms: timing[`${phase}_ms`] })).filter((part) => part.ms > 0);
  const total = parts.reduce((sum, part) => sum + part.ms, 0);
  if (!box.children.length) box.append(element("div", { class: "phase-bar" }), element("ul", { class: "phase-list" }), element("p", { class: "muted" }));
  const [bar, list, words] = box.children;
  keyed(bar, parts, (part) => part.phase, (part) => element("span", { class: `part ${part.phase}` }), (span, part) => {
    span.style.width = `${((100 * part.ms) / total).toFixed(2)}%`;
  });
  keyed(list, parts, (part) => part.phase, (part) => element("li", { class: part.phase }), (item, part) => {
    setText(item, `${part.phase} ${milliseconds(part.ms)}`);
  });
  const way = timing.prefill_worker === timing.decode_worker ? timing.decode_worker : `${timing.prefill_worker} → ${timing.decode_worker} by ${timing.kv_path}`;
  setText(words, `first token after ${milliseconds(timing.ttft_ms)}; ${way}, ${timing.route}`);
  box.hidden = false;
}
