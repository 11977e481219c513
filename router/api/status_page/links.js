// The lines behind the cards: prompts from the router down the left, KV blocks across the middle, tokens back up the
// right. They follow the cards, wherever these are; a narrow page has none, and a list says the same.

import { byId, drawing } from "./dom.js";
import { short } from "./format.js";

const MARGIN = 10;
let latest = null;

/** Draw the links of a report, and again whenever the page has another size. */
export function drawLinks(report) {
  if (latest === null) new ResizeObserver(() => latest && draw(latest)).observe(byId("topology"));
  latest = report;
  draw(report);
}

function draw(report) {
  const svg = byId("links");
  if (getComputedStyle(svg).display === "none") return svg.replaceChildren();
  const frame = byId("topology").getBoundingClientRect();
  svg.setAttribute("width", frame.width);
  svg.setAttribute("height", frame.height);
  const boxes = new Map();
  for (const card of byId("topology").querySelectorAll(".worker")) boxes.set(card.dataset.worker, placed(card, frame));
  const router = placed(byId("router"), frame);
  const workers = report.devices.flatMap((device) => device.workers).filter((worker) => boxes.has(worker.id));
  svg.replaceChildren(...trunks(workers, boxes, router, frame), ...ways(report, boxes));
}

const isBusy = (worker) => worker.prompts + worker.handoffs + worker.decoding > 0;

function placed(card, frame) {
  const box = card.getBoundingClientRect();
  const left = box.left - frame.left;
  const top = box.top - frame.top;
  return { left, right: left + box.width, top, bottom: top + box.height, middle: top + box.height / 2 };
}

/** From the router to each worker that computes prompts, and back from each that decodes. */
function trunks(workers, boxes, router, frame) {
  return workers.map((worker) => {
    const box = boxes.get(worker.id);
    const isDecode = worker.role === "decode";
    const x = isDecode ? frame.width - MARGIN : MARGIN;
    const edge = isDecode ? box.right : box.left;
    const bend = isDecode ? -8 : 8;
    const points = `M ${edge} ${box.middle} L ${x + bend} ${box.middle} Q ${x} ${box.middle} ${x} ${box.middle - 8} L ${x} ${router.middle + 8} Q ${x} ${router.middle} ${x + bend} ${router.middle} L ${isDecode ? router.right : router.left} ${router.middle}`;
    return drawing("path", { class: `link ${worker.role}${isBusy(worker) ? " active" : ""}`, d: points });
  });
}

/** KV paths: a line each, and a label for those that go the same way between the same devices. */
function ways(report, boxes) {
  const lines = [];
  const labels = new Map();
  const deviceOf = new Map(report.devices.flatMap((device) => device.workers.map((worker) => [worker.id, device.id])));
  const busy = new Set(report.devices.flatMap((device) => device.workers).filter(isBusy).map((worker) => worker.id));
  for (const path of report.kv_paths) {
    const [from, to] = [boxes.get(path.prefill), boxes.get(path.decode)];
    if (!from || !to) continue;
    const middle = (from.right + to.left) / 2;
    const d = `M ${from.right} ${from.middle} C ${middle} ${from.middle} ${middle} ${to.middle} ${to.left} ${to.middle}`;
    const state = path.error ? " broken" : busy.has(path.prefill) && busy.has(path.decode) ? " active" : "";
    lines.push(drawing("path", { class: `link handoff${state}`, d }));
    const devices = [deviceOf.get(path.prefill), deviceOf.get(path.decode)].sort();
    const group = [...devices, path.transport, Boolean(path.error)].join("\n");
    const label = labels.get(group) ?? { path, x: middle, ys: [], speeds: [] };
    label.ys.push((from.middle + to.middle) / 2);
    if (path.gb_per_s) label.speeds.push(path.gb_per_s);
    labels.set(group, label);
  }
  return [...lines, ...apart([...labels.values()]).flatMap(labelOf)];
}

/** Labels one below the other where they would lie on one another. */
function apart(labels) {
  for (const label of labels) label.y = label.ys.reduce((sum, y) => sum + y, 0) / label.ys.length;
  labels.sort((one, other) => one.y - other.y);
  labels.forEach((label, index) => {
    if (index && label.y < labels[index - 1].y + 24) label.y = labels[index - 1].y + 24;
  });
  return labels;
}

function labelOf({ path, x, y, speeds }) {
  const speed = speeds.length ? `${short(speeds.reduce((sum, each) => sum + each, 0) / speeds.length)} GB/s` : "";
  const text = path.error ? "broken" : speed || path.transport;
  const width = 14 + 6.6 * text.length;
  return [
    drawing("rect", { class: `label-box${path.error ? " broken" : ""}`, x: x - width / 2, y: y - 11, width, height: 22, rx: 11 }),
    drawing("text", { class: "label", x, y: y + 4, "text-anchor": "middle" }, text),
  ];
}
