// Small lines of the last minutes: one number large, how it went below.

import { byId, drawing, element, keyed, setText } from "./dom.js";
import { milliseconds, short } from "./format.js";

const WIDTH = 240;
const HEIGHT = 56;

const CHARTS = [
  { key: "ttft", title: "Time to first token", lines: ["ttft_p50_ms", "ttft_p99_ms"], names: ["p50", "p99"], show: milliseconds, isLog: true },
  { key: "itl", title: "Between tokens", lines: ["itl_p50_ms", "itl_p99_ms"], names: ["p50", "p99"], show: milliseconds, isLog: true },
  { key: "tokens", title: "Tokens a second", lines: ["tokens_per_s"], names: [""], show: short },
  { key: "load", title: "Requests", lines: ["running", "queued"], names: ["at workers", "queued"], show: short },
];

/** Draw all charts of a report. */
export function showCharts(report) {
  const { history, period_s: periodS } = report;
  const minutes = Math.round((history.at_s.length * periodS) / 60);
  setText(byId("charts-span"), minutes > 1 ? `${minutes} minutes` : "minute");
  keyed(byId("charts"), CHARTS, (chart) => chart.key, makeChart, (card, chart) => changeChart(card, chart, history));
}

function makeChart(chart) {
  const values = element("p", { class: "values" });
  chart.names.forEach((name, index) => {
    values.append(element("span", { class: `value line-${index}` }, element("b", {}), name ? ` ${name}` : ""));
  });
  const svg = drawing("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  return element("figure", { class: "card chart" }, element("figcaption", {}, chart.title), values, svg, element("p", { class: "scale muted" }));
}

function changeChart(card, chart, history) {
  const columns = chart.lines.map((line) => history[line] ?? []);
  const values = columns.flat().filter((value) => value !== null);
  const most = Math.max(1e-9, ...values);
  const least = Math.min(most, ...values.filter((value) => value > 0));
  const heightOf = chart.isLog ? onLogScale(least, most) : (value) => value / most;
  card.querySelectorAll(".value b").forEach((shown, index) => setText(shown, chart.show(latest(columns[index]))));
  const svg = card.querySelector("svg");
  const words = chart.lines.map((_, index) => `${chart.names[index]} ${chart.show(latest(columns[index]))}`.trim());
  svg.setAttribute("aria-label", `${chart.title}: ${words.join(", ")}; at most ${chart.show(most)}`);
  svg.replaceChildren(...columns.flatMap((column, index) => lineOf(column, heightOf, index)).reverse());
  const range = chart.isLog ? `${chart.show(least)} to ${chart.show(most)}` : `at most ${chart.show(most)}`;
  setText(card.querySelector(".scale"), most > 1e-6 ? range : "nothing yet");
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
function lineOf(column, heightOf, index) {
  const step = WIDTH / Math.max(1, column.length - 1);
  const runs = [];
  column.forEach((value, place) => {
    if (value === null) return;
    const point = [place * step, HEIGHT - 2 - heightOf(value) * (HEIGHT - 6)];
    if (place > 0 && column[place - 1] !== null && runs.length) runs.at(-1).push(point);
    else runs.push([point]);
  });
  return runs.flatMap((run) => {
    if (run.length === 1) run.push([run[0][0] + Math.max(2, step / 2), run[0][1]]);
    const path = run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join(" L ");
    const area = `M ${run[0][0].toFixed(1)} ${HEIGHT} L ${path} L ${run.at(-1)[0].toFixed(1)} ${HEIGHT} Z`;
    const line = drawing("path", { class: `stroke line-${index}`, d: `M ${path}` });
    return index === 0 ? [line, drawing("path", { class: `area line-${index}`, d: area })] : [line];
  });
}
