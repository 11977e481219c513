// Numbers as people read them.

const NUMBERS = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => NUMBERS.format(value);

/** With three digits at most, and k or M where there are more. */
export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
  return value >= 100 || Number.isInteger(value) ? count(value) : value.toPrecision(2);
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} s`;
  if (value >= 100) return `${count(value)} ms`;
  return `${value >= 10 ? value.toFixed(1) : value.toFixed(2)} ms`;
}

export const bytes = (value) => (value >= 1e9 ? `${(value / 1e9).toPrecision(3)} GB` : `${(value / 1e6).toPrecision(3)} MB`);

export const percent = (share) => `${Math.round(100 * share)} %`;

export function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

/** A moment, seconds since 1970, as a clock here shows it: with its day if that is another one. */
export function clock(atS, nowS, withSeconds = true) {
  const at = new Date(1000 * atS);
  const time = at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(withSeconds ? { second: "2-digit" } : {}) });
  const isToday = at.toDateString() === new Date(1000 * nowS).toDateString();
  return isToday ? time : `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}

/** How often something happens, a second. */
export const rate = (value) => (value === null || value === undefined ? "–" : value && value < 10 ? value.toFixed(1) : short(value));

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
