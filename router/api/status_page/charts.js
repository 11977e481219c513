// Small lines of the last minutes: one number large, how it went below, and when that was.

import { byId, drawing, element, keyed, setText } from "./dom.js";
import { clock, milliseconds, percent, rate, short } from "./format.js";

const WIDTH = 240;
const HEIGHT = 56;
const TICKS_S = [10, 30, 60, 120, 300];
const MOST_TICKS = 4;

const CHARTS = [
  { key: "ttft", title: "Time to first token", lines: ["ttft_p50_ms", "ttft_p99_ms"], names: ["median", "slowest 1 %"], show: milliseconds, isLog: true },
  { key: "itl", title: "Time between two tokens", lines: ["itl_p50_ms", "itl_p99_ms"], names: ["median", "slowest 1 %"], show: milliseconds, isLog: true },
  { key: "tokens", title: "Tokens written a second", lines: ["tokens_per_s"], names: [""], show: short },
  { key: "load", title: "Requests", lines: ["running", "queued"], names: ["at workers", "waiting"], show: short },
  { key: "errors", title: "Errors and refusals a second", lines: ["failed_per_s", "refused_per_s"], names: ["failed", "refused"], show: rate },
  { key: "kv", title: "Memory for texts (KV blocks)", lines: ["kv_usage"], names: ["in use"], show: percent, most: 1 },
];

/** Draw all charts of a report. Of what is there now the number is the report's, not that of the last sample. */
export function showCharts(report) {
  const { history, period_s: periodS } = report;
  const minutes = Math.round((history.at_s.length * periodS) / 60);
  setText(byId("charts-span"), minutes > 1 ? `${minutes} minutes` : "minute");
  keyed(byId("charts"), CHARTS, (chart) => chart.key, makeChart, (card, chart) => changeChart(card, chart, report));
}

function makeChart(chart) {
  const values = element("p", { class: "values" });
  chart.names.forEach((name, index) => {
    values.append(element("span", { class: `value line-${index}` }, element("b", {}), name ? ` ${name}` : ""));
  });
  const svg = drawing("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  const axis = element("div", { class: "axis muted", "aria-hidden": "true" });
  return element("figure", { class: "card chart" }, element("figcaption", {}, chart.title), values, svg, axis, element("p", { class: "scale muted" }));
}

function changeChart(card, chart, report) {
  const { history } = report;
  const columns = chart.lines.map((line) => history[line] ?? []);
  const now = chart.lines.map((line) => report[line] ?? null);
  const values = [...columns.flat(), ...now].filter((value) => value !== null);
  const most = Math.max(1e-9, chart.most ?? 0, ...values);
  const least = Math.min(most, ...values.filter((value) => value > 0));
  const heightOf = chart.isLog ? onLogScale(least, most) : (value) => value / most;
  const shown = now.map((value, index) => chart.show(value ?? latest(columns[index])));
  card.querySelectorAll(".value b").forEach((value, index) => setText(value, shown[index]));
  const svg = card.querySelector("svg");
  const words = chart.names.map((name, index) => `${name} ${shown[index]}`.trim());
  const placeOf = onTimeScale(history.at_s);
  const ticks = ticksOf(history.at_s);
  svg.setAttribute("aria-label", `${chart.title}: ${words.join(", ")}; at most ${chart.show(most)}`);
  svg.replaceChildren(
    ...ticks.map((atS) => drawing("path", { class: "tick", d: `M ${placeOf(atS)} 0 V ${HEIGHT}` })),
    ...columns.flatMap((column, index) => lineOf(column, history.at_s.map(placeOf), heightOf, index)).reverse(),
  );
  showAxis(card.querySelector(".axis"), ticks, placeOf, report.now_s);
  const range = chart.isLog ? `${chart.show(least)} to ${chart.show(most)}` : `at most ${chart.show(chart.most ? Math.max(0, ...values) : most)}`;
  setText(card.querySelector(".scale"), values.some((value) => value > 0) ? range : "none yet");
}

/** Times of the clock below the line, each where it was. */
function showAxis(axis, ticks, placeOf, nowS) {
  const isShort = ticks.length > 1 && ticks[1] - ticks[0] < 60;
  keyed(axis, ticks, (atS) => atS, () => element("span", {}), (label, atS) => {
    setText(label, clock(atS, nowS, isShort));
    label.style.left = `${((100 * placeOf(atS)) / WIDTH).toFixed(2)}%`;
  });
}

function onTimeScale(times) {
  const [first, last] = [times[0] ?? 0, times.at(-1) ?? 1];
  return (atS) => (WIDTH * (atS - first)) / Math.max(1, last - first);
}

/** Round times of the clock between the first and the last, few enough to be read, and none at the very edge. */
function ticksOf(times) {
  const [first, last] = [times[0] ?? 0, times.at(-1) ?? 0];
  const stepS = TICKS_S.find((step) => (last - first) / step <= MOST_TICKS) ?? TICKS_S.at(-1);
  const edge = (last - first) * 0.07;
  const ticks = [];
  for (let atS = Math.ceil((first + edge) / stepS) * stepS; atS <= last - edge && last > first; atS += stepS) ticks.push(atS);
  return ticks;
}

/** Of times, so that a long one leaves room for the others to be seen. */
function onLogScale(least, most) {
  const span = Math.max(Math.log(4), Math.log(most / least));
  return (value) => 0.12 + (0.88 * Math.log(Math.max(value, least) / least)) / span;
}

/** The last value that there is among the last few: one without a request says nothing. */
function latest(column) {
  return column.slice(-5).findLast((value) => value !== null) ?? null;
}

/** A line with what is below it; it is cut where there is no value. */
function lineOf(column, places, heightOf, index) {
  const runs = [];
  column.forEach((value, number) => {
    if (value === null) return;
    const point = [places[number], HEIGHT - 2 - heightOf(value) * (HEIGHT - 6)];
    if (number > 0 && column[number - 1] !== null && runs.length) runs.at(-1).push(point);
    else runs.push([point]);
  });
  return runs.flatMap((run) => {
    if (run.length === 1) run.push([run[0][0] + 2, run[0][1]]);
    const path = run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join(" L ");
    const area = `M ${run[0][0].toFixed(1)} ${HEIGHT} L ${path} L ${run.at(-1)[0].toFixed(1)} ${HEIGHT} Z`;
    const line = drawing("path", { class: `stroke line-${index}`, d: `M ${path}` });
    return index === 0 ? [line, drawing("path", { class: `area line-${index}`, d: area })] : [line];
  });
}
