// The page's clockwork: ask for a report every other second while somebody looks, and show it.

import { showCharts } from "./charts.js";
import { byId, element, keyed, setText } from "./dom.js";
import { clock, count, duration } from "./format.js";
import { showRequests } from "./requests.js";
import { fetchReport, key, KeyWanted } from "./server.js";
import { showTopology } from "./topology.js";
import { offerTryout, prepareTryout } from "./tryout.js";

const PERIOD_MS = 2000;
const STATES = { ok: "serving", degraded: "degraded", draining: "draining", unavailable: "not serving" };
const STAGES = [
  ["queued", "Queued", (report) => (report.queued ? `${count(report.queued_prompt_tokens)} prompt tokens wait` : "wait for a worker")],
  ["prefill", "Prefill", () => "prompt is being read"],
  ["handoff", "Handoff", () => "moving to a decode worker"],
  ["decode", "Decode", () => "text is being written"],
];

let heard = null; // when there was an answer
let timer = null;

function show(report) {
  heard = new Date();
  byId("content").hidden = false;
  byId("key-form").hidden = true;
  byId("forget-key").hidden = !key.get();
  document.title = `${report.status === "ok" ? "" : `${STATES[report.status]} · `}${report.model} · Baton`;
  setText(byId("model"), report.model);
  setText(byId("about"), `version ${report.version} · up ${duration(report.up_s)} · up to ${count(report.max_model_len)} tokens, prompt and answer`);
  showState(report.status, STATES[report.status]);
  showProblems(report.problems, report.status);
  keyed(byId("stages"), STAGES, ([name]) => name, makeStage, (item, stage) => changeStage(item, stage, report));
  showCharts(report);
  showTopology(report);
  showRequests(report);
  showIncidents(report);
  offerTryout(report);
}

function showState(state, words) {
  const pill = byId("state");
  pill.className = `pill ${state}`;
  setText(pill, words);
}

function showProblems(problems, state) {
  byId("problems").hidden = !problems.length;
  byId("problems").className = `notice ${state}`;
  setText(byId("problems"), problems.join(". "));
}

function makeStage([name, title]) {
  return element("li", { class: `stage card ${name}` }, element("span", { class: "title" }, title), element("b", {}), element("span", { class: "muted" }));
}

function changeStage(item, [name, , words], report) {
  setText(item.querySelector("b"), count(report.phases[name]));
  setText(item.querySelector(".muted"), words(report));
  item.classList.toggle("some", report.phases[name] > 0);
}

function showIncidents(report) {
  const told = report.incidents.map((incident) => ({ ...incident, ago: report.now_s - incident.at_s }));
  const shown = told.length ? told : [{ kind: "none", text: "Nothing.", num: 1, ago: null }];
  keyed(byId("incidents"), shown, (incident) => `${incident.kind}\n${incident.text}\n${incident.at_s}`, makeIncident, (item, incident) => {
    setText(item.querySelector(".ago"), incident.ago === null ? "" : `${clock(incident.at_s, report.now_s)}, ${duration(incident.ago)} ago`);
    setText(item.querySelector(".times"), incident.num > 1 ? `${count(incident.num)} times` : "");
  });
}

function makeIncident(incident) {
  return element(
    "li",
    { class: incident.kind },
    element("span", { class: "badge" }, incident.kind === "none" ? "quiet" : incident.kind),
    element("span", { class: "what" }, incident.text, " ", element("span", { class: "times muted" })),
    element("span", { class: "ago muted" }),
  );
}

async function look() {
  clearTimeout(timer);
  try {
    show(await fetchReport());
  } catch (error) {
    if (error instanceof KeyWanted) return askForKey(error.message);
    showState("lost", heard === null ? "no contact" : `no contact since ${heard.toLocaleTimeString()}`);
  }
  document.body.classList.toggle("stale", byId("state").classList.contains("lost"));
  if (!document.hidden) timer = setTimeout(look, PERIOD_MS);
}

function askForKey(message) {
  showState("locked", "locked");
  if (key.get()) setText(byId("key-hint"), message);
  key.forget();
  byId("content").hidden = true;
  byId("forget-key").hidden = true;
  showProblems([], "");
  byId("key-form").hidden = false;
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  key.set(byId("key").value.trim());
  byId("key").value = "";
  look();
});
byId("forget-key").addEventListener("click", () => {
  key.forget();
  look();
});
document.addEventListener("visibilitychange", () => document.hidden || look());
prepareTryout();
look();
