// Single requests: those that are under way for longest, and those that took longest lately, with where the time went.

import { byId, element, keyed, setText } from "./dom.js";
import { clock, count, milliseconds, plural } from "./format.js";

const PHASES = ["queued", "prefill", "handoff", "decode"];
const OUTCOMES = { stop: "done", length: "done, at its limit", tool_calls: "done", failed: "failed", aborted: "left by its client", finished: "done" };

/** Show both lists of a report. */
export function showRequests(report) {
  show("longest", report.longest, report, "No request is under way.");
  show("slowest", report.slowest, report, "None has ended in the last five minutes.");
}

function show(id, requests, report, none) {
  const shown = requests.length ? requests : [{ id: "", none }];
  keyed(byId(id), shown, (request) => request.id, makeRequest, (item, request) => changeRequest(item, request, report));
}

function makeRequest(request) {
  if (request.none) return element("li", { class: "muted" }, request.none);
  return element(
    "li",
    { class: "request" },
    element("p", { class: "request-head" }, element("span", { class: "badge" }), element("b", {}), element("span", { class: "request-id muted" }), element("span", { class: "ago muted" })),
    element("div", { class: "phase-bar" }),
    element("p", { class: "request-words muted" }),
  );
}

function changeRequest(item, request, report) {
  if (request.none) return;
  const badge = item.querySelector(".badge");
  badge.className = `badge ${request.phase ?? request.outcome}`;
  setText(badge, request.phase ?? OUTCOMES[request.outcome] ?? request.outcome);
  setText(item.querySelector("b"), milliseconds(request.e2e_ms));
  setText(item.querySelector(".request-id"), request.id);
  setText(item.querySelector(".ago"), request.ended_s ? `ended ${clock(request.ended_s, report.now_s)}` : `since ${clock(report.now_s - request.e2e_ms / 1000, report.now_s)}`);
  const parts = PHASES.map((phase) => ({ phase, ms: request[`${phase}_ms`] })).filter((part) => part.ms > 0);
  const total = Math.max(1e-9, parts.reduce((sum, part) => sum + part.ms, 0));
  const bar = item.querySelector(".phase-bar");
  keyed(bar, parts, (part) => part.phase, (part) => element("span", { class: `part ${part.phase}` }), (span, part) => {
    span.style.width = `${((100 * part.ms) / total).toFixed(2)}%`;
  });
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", parts.map((part) => `${part.phase} ${milliseconds(part.ms)}`).join(", "));
  setText(item.querySelector(".request-words"), wordsOf(request, parts));
}

function wordsOf(request, parts) {
  const spent = parts.filter((part) => part.ms >= 1).map((part) => `${part.phase} ${milliseconds(part.ms)}`).join(", ");
  const first = request.ttft_ms === null ? "no token yet" : `first token after ${milliseconds(request.ttft_ms)}`;
  const reused = request.cached_tokens ? ` (${count(request.cached_tokens)} reused)` : "";
  const tokens = `${plural(request.prompt_tokens, "prompt token")}${reused}, ${count(request.output_tokens)} of at most ${plural(request.most_tokens, "token")} written`;
  const both = request.prefill_worker === request.decode_worker ? [request.decode_worker] : [request.prefill_worker, request.decode_worker];
  const workers = both.filter(Boolean).join(" → ") || "no worker yet";
  const attempts = request.attempts > 1 ? `, attempt ${request.attempts}` : "";
  return `${spent || "just begun"} · ${first} · ${tokens} · ${workers}${attempts}`;
}
