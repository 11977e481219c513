// The box in which a prompt is tried: an ordinary client of this server, with streaming.

import { byId, setText } from "./dom.js";
import { milliseconds, plural } from "./format.js";
import { request } from "./server.js";

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
  setText(byId("outcome"), "waiting for the first token");
  let end = { text: "the stream ended early" };
  const sent = performance.now();
  let firstMs = null;
  try {
    const response = await request(...asked(), stopping.signal);
    for await (const event of events(response)) {
      firstMs ??= performance.now() - sent;
      end = take(event, output) ?? end;
    }
    if (firstMs !== null) end.text += `, the first after ${milliseconds(firstMs)}`;
  } catch (error) {
    end = { text: error.name === "AbortError" ? "stopped" : `failed: ${error.message}`, failed: error.name !== "AbortError" };
  }
  setText(byId("outcome"), end.text);
  byId("outcome").classList.toggle("failed", Boolean(end.failed));
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
  return { text: `${plural(numOut, "token")} after ${plural(numPrompt, "prompt token")}${cached}` };
}
