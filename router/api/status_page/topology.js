// Who serves: the router, each device with its memory server and its workers, and the ways between them.

import { byId, element, keyed, setBar, setText } from "./dom.js";
import { count, duration, bytes, milliseconds, percent, plural, short } from "./format.js";
import { drawLinks } from "./links.js";

const SILENT_S = 2;

/** Show all of a report; links are drawn when everything has its place. */
export function showTopology(report) {
  const router = byId("router");
  if (!router.children.length) router.append(element("b", {}, "router"), element("span", { class: "muted" }));
  setText(router.lastChild, `${plural(report.running, "request")} at workers, ${count(report.queued)} waiting`);
  byId("nobody").hidden = report.devices.length > 0;
  keyed(byId("devices"), report.devices, (device) => device.id, makeDevice, changeDevice);
  showPaths(report);
  drawLinks(report);
}

function makeDevice(device) {
  return element(
    "article",
    { class: "device card", "aria-label": `device ${device.id}` },
    element("div", { class: "device-head" }, element("h3", {}), element("span", { class: "gpu-use" }), element("span", { class: "muted uuid" })),
    element("div", { class: "memories" }),
    element("div", { class: "columns" }, element("div", { class: "column prefill" }), element("div", { class: "column decode" })),
  );
}

function changeDevice(card, device) {
  const [place, ...rest] = device.name.split(" ");
  const uuid = rest.length > 1 ? rest.pop() : "";
  card.querySelector(".uuid").title = uuid;
  setText(card.querySelector("h3"), rest.length ? `${rest.join(" ")} · ${place}` : place);
  setText(card.querySelector(".uuid"), uuid.replace(/^GPU-/, "").slice(0, 8));
  setText(card.querySelector(".gpu-use"), useWords(device.memory_servers));
  keyed(card.querySelector(".memories"), device.memory_servers, (server) => server.id, makeMemory, changeMemory);
  for (const role of ["prefill", "decode"]) {
    const workers = device.workers.filter((worker) => worker.role === role);
    keyed(card.querySelector(`.column.${role}`), workers, (worker) => worker.id, makeWorker, changeWorker);
  }
}

/** How busy and how warm a GPU is, if somebody says. */
function useWords(servers) {
  const told = servers.find((server) => server.gpu_percent !== null || server.gpu_celsius !== null);
  if (!told) return "";
  const words = [told.gpu_percent === null ? "" : `GPU ${told.gpu_percent} % busy`, told.gpu_celsius === null ? "" : `${told.gpu_celsius} °C`];
  return words.filter(Boolean).join(" · ");
}

function makeMemory(server) {
  return element(
    "div",
    { class: "memory" },
    element("p", { class: "memory-head" }, element("span", { class: "name" }, server.id), element("span", { class: "muted" })),
    element("div", { class: "bar blocks" }),
    element("p", { class: "legend muted" }, element("span", { class: "swatch used" }), element("span", { class: "swatch cached" })),
  );
}

function changeMemory(row, server) {
  const blocks = Math.max(1, server.blocks);
  const used = server.used_blocks / blocks;
  const host = server.host_bytes ? ` · ${bytes(server.host_bytes)} of host memory for ${plural(server.host_blocks, "block")}` : "";
  const late = server.heard_s > SILENT_S ? ` · silent for ${duration(server.heard_s)}` : "";
  setText(row.querySelector(".memory-head .muted"), `model ${bytes(server.weights_bytes)} · ${bytes(server.free_bytes)} free on the device${host}${late}`);
  const kept = Math.min(server.cached_blocks, server.blocks - server.used_blocks);
  setBar(row.querySelector(".bar"), `memory for texts: ${percent(used)} in use, ${percent(kept / blocks)} kept for prompts that begin alike`, [
    { kind: "used", share: used },
    { kind: "cached", share: kept / blocks },
  ]);
  setText(row.querySelector(".swatch.used"), `${count(server.used_blocks)} of ${count(server.blocks)} KV blocks hold texts under way (${percent(used)})`);
  const lost = server.quarantined_blocks ? `, ${count(server.quarantined_blocks)} of workers that died` : "";
  setText(row.querySelector(".swatch.cached"), `${count(kept)} kept, to be reused by prompts that begin alike${lost}`);
}

function makeWorker(worker) {
  return element(
    "div",
    { class: `worker node ${worker.role}` },
    element(
      "p",
      { class: "worker-head" },
      element("span", { class: "role" }, worker.role),
      element("span", { class: "name" }, worker.id),
      element("span", { class: "badge" }),
    ),
    element("div", { class: "bar load" }),
    element("p", { class: "load-words" }),
    element("p", { class: "step-words muted" }),
  );
}

function changeWorker(card, worker) {
  const isDecode = worker.role === "decode";
  const here = worker.prompts + worker.handoffs + worker.decoding;
  card.dataset.worker = worker.id;
  card.dataset.here = here;
  card.classList.toggle("busy", here > 0);
  card.classList.toggle("aside", worker.state === "in reserve" || worker.state === "leaving");
  card.classList.toggle("silent", worker.state === "silent");
  const badge = card.querySelector(".badge");
  badge.hidden = worker.state === "serving";
  setText(badge, worker.state);
  card.title = `${worker.id}: pid ${worker.pid}, version ${worker.version}, here for ${duration(worker.since_s)}`;
  const share = isDecode ? (worker.handoffs + worker.decoding) / Math.max(1, worker.most_sequences) : worker.busy;
  setBar(card.querySelector(".bar"), loadWords(worker, isDecode), [{ kind: "used", share }]);
  setText(card.querySelector(".load-words"), loadWords(worker, isDecode));
  setText(card.querySelector(".step-words"), stepWords(worker, here, isDecode));
}

/** What it has at this moment, in the phases that the requests above are counted by. */
function loadWords(worker, isDecode) {
  const prompts = `${plural(worker.prompts, "prompt")}, ${plural(worker.outstanding_prompt_tokens, "token")} to compute`;
  if (!isDecode) return prompts;
  const also = [
    worker.handoffs ? `${count(worker.handoffs)} arriving` : "",
    worker.coming ? `${count(worker.coming)} to come` : "",
    worker.prompts ? prompts : "",
  ].filter(Boolean);
  return [`${count(worker.decoding)} of at most ${plural(worker.most_sequences, "text")} being written`, ...also].join(", ");
}

function stepWords(worker, here, isDecode) {
  if (worker.step_age_s > SILENT_S && here) return `no step for ${duration(worker.step_age_s)}`;
  if (worker.step_ms === null) return "idle";
  const turns = worker.in_turns ? "in turns: streams wait for prompts · " : "";
  return `${turns}${milliseconds(worker.step_ms)} a step · ${short(worker.tokens_per_s)} ${isDecode ? "" : "prompt "}tokens a second · busy ${percent(worker.busy)}`;
}

function showPaths(report) {
  const { kv_paths: paths, num_kv_paths: number } = report;
  const broken = paths.filter((path) => path.error).length;
  byId("paths").hidden = !number;
  setText(byId("paths-summary"), `${plural(number, "KV path")}${broken ? `, ${count(broken)} broken` : ""}`);
  keyed(byId("paths-list"), paths, (path) => `${path.prefill}\n${path.decode}`, () => element("li"), (item, path) => {
    item.classList.toggle("broken", Boolean(path.error));
    setText(item, `${path.prefill} → ${path.decode}: ${wayOf(path)}${path.error ? `, ${path.error}` : ""}`);
  });
}

/** How blocks travel along a path, and how fast. */
export function wayOf(path) {
  return path.gb_per_s === null || path.error ? path.transport : `${path.transport} ${short(path.gb_per_s)} GB/s`;
}
