// Who serves: the router, each device with its memory server and its workers, and the ways between them.

import { byId, element, keyed, setBar, setText } from "./dom.js";
import { count, duration, bytes, milliseconds, percent, plural, short } from "./format.js";
import { drawLinks } from "./links.js";

const SILENT_S = 2;

/** Show all of a report; links are drawn when everything has its place. */
export function showTopology(report) {
  const router = byId("router");
  if (!router.children.length) router.append(element("b", {}, "router"), element("span", { class: "muted" }));
  setText(router.lastChild, `${plural(report.running, "request")} at workers, ${count(report.queued)} queued`);
  byId("nobody").hidden = report.devices.length > 0;
  keyed(byId("devices"), report.devices, (device) => device.id, makeDevice, changeDevice);
  showPaths(report);
  drawLinks(report);
}

function makeDevice(device) {
  return element(
    "article",
    { class: "device card", "aria-label": `device ${device.id}` },
    element("div", { class: "device-head" }, element("h3", {}), element("span", { class: "muted uuid" })),
    element("div", { class: "memories" }),
    element("div", { class: "columns" }, element("div", { class: "column prefill" }), element("div", { class: "column decode" })),
  );
}

function changeDevice(card, device) {
  const [place, ...rest] = device.name.split(" ");
  const uuid = rest.length && rest.at(-1).startsWith("GPU-") ? rest.pop() : "";
  card.querySelector(".uuid").title = uuid;
  setText(card.querySelector("h3"), rest.length ? `${rest.join(" ")} · ${place}` : place);
  setText(card.querySelector(".uuid"), uuid.split("-").slice(0, 2).join("-"));
  keyed(card.querySelector(".memories"), device.memory_servers, (server) => server.id, makeMemory, changeMemory);
  for (const role of ["prefill", "decode"]) {
    const workers = device.workers.filter((worker) => worker.role === role);
    keyed(card.querySelector(`.column.${role}`), workers, (worker) => worker.id, makeWorker, changeWorker);
  }
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
  setText(row.querySelector(".memory-head .muted"), `${bytes(server.weights_bytes)} of weights · ${bytes(server.free_bytes)} left${host}${late}`);
  const kept = Math.min(server.cached_blocks, server.blocks - server.used_blocks);
  setBar(row.querySelector(".bar"), `KV blocks: ${percent(used)} in use, ${percent(kept / blocks)} kept`, [
    { kind: "used", share: used },
    { kind: "cached", share: kept / blocks },
  ]);
  setText(row.querySelector(".swatch.used"), `${count(server.used_blocks)} of ${count(server.blocks)} KV blocks in use (${percent(used)})`);
  const lost = server.quarantined_blocks ? `, ${count(server.quarantined_blocks)} of the dead` : "";
  setText(row.querySelector(".swatch.cached"), `${count(kept)} kept for texts to come${lost}`);
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
  card.dataset.worker = worker.id;
  card.classList.toggle("busy", worker.running > 0);
  card.classList.toggle("aside", worker.state === "in reserve" || worker.state === "draining");
  card.classList.toggle("silent", worker.state === "silent");
  const badge = card.querySelector(".badge");
  badge.hidden = worker.state === "serving";
  setText(badge, worker.state);
  card.title = `${worker.id}: pid ${worker.pid}, version ${worker.version}, here for ${duration(worker.since_s)}`;
  const share = isDecode ? worker.assigned / Math.max(1, worker.most_sequences) : worker.busy;
  const words = isDecode
    ? `${count(worker.assigned)} of ${plural(worker.most_sequences, "sequence")}`
    : `${plural(worker.assigned, "prompt")}, ${count(worker.outstanding_prompt_tokens)} tokens to compute`;
  setBar(card.querySelector(".bar"), words, [{ kind: "used", share }]);
  const waits = worker.waiting + (isDecode ? worker.handoffs : 0);
  setText(card.querySelector(".load-words"), waits ? `${words}, ${count(waits)} waiting` : words);
  setText(card.querySelector(".step-words"), stepWords(worker));
}

function stepWords(worker) {
  if (worker.step_age_s > SILENT_S && worker.running) return `no step for ${duration(worker.step_age_s)}`;
  if (worker.step_ms === null) return "idle";
  return `${milliseconds(worker.step_ms)} a step · ${short(worker.tokens_per_s)} tokens/s · busy ${percent(worker.busy)}`;
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
