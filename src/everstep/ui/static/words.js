// Values as people read them: numbers, durations, times, sizes, settings.

export const numberOf = (value) => (typeof value === "string" ? Number(value) : value);

/** A number as people read it: five digits, no exponent where none is needed. */
export function format(value) {
  const number = numberOf(value);
  if (number === null || number === undefined) return "–";
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "NaN" : number > 0 ? "∞" : "−∞";
  if (Number.isInteger(number) && Math.abs(number) < 1e9) return number.toLocaleString("en").replace("-", "−");
  const size = Math.abs(number);
  const text = size >= 1e6 || size < 1e-4 ? number.toExponential(3) : String(Number(number.toPrecision(5)));
  return text.replace("-", "−").replace("e−", "e-");
}

/** "1 run", "2 runs", "10,000 runs". */
export const count = (number, one, several = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : several}`;

/** Seconds as people read them: 45 s, 12 min, 3.5 h, 2 d. */
export function duration(seconds) {
  const size = Math.abs(seconds);
  const [unit, name] = size < 120 ? [1, "s"] : size < 7200 ? [60, "min"] : size < 172800 ? [3600, "h"] : [86400, "d"];
  const number = seconds / unit;
  return `${size < 10 && unit === 1 ? Number(number.toPrecision(2)) : Number(number.toPrecision(3))} ${name}`;
}

const two = (part) => String(part).padStart(2, "0");

function local(seconds) {
  const date = new Date(seconds * 1000);
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return [day, `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`];
}

/** Seconds since 1970 as local time; the day is left out where it is that of `before`. */
export function clock(seconds, before) {
  if (!seconds) return "–";
  const [day, time] = local(seconds);
  return before && local(before)[0] === day ? time : `${day} ${time}`;
}

export function bytes(size) {
  if (typeof size !== "number") return "–";
  const power = Math.min(5, Math.max(0, Math.floor(Math.log10(Math.max(1, size)) / 3)));
  return `${Number((size / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB", "PB"][power]}`;
}

const TURNS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Text with its characters that turn the direction of writing as codes: a name must not change what stands beside it. */
export const plain = (text) => text.replace(TURNS, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);

const quoted = (word) => (/^[\w%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`);

/** Words as a line for a terminal. */
export const commandLine = (given) => given.map(quoted).join(" ");

/** A value of a record, by its name: a command line is one line. */
export const recorded = (name, value) => (/(^|\.)argv$/.test(name) && Array.isArray(value) ? commandLine(value.map(String)) : words(value ?? undefined));

const PHASES = { epoch: "means of an epoch's steps", step: "at each step", tail: "after an epoch's steps", head: "before an epoch's first step", eval: "by a service" };

/** Metrics by name, those that have one phase first: [{stream, metric, title}], with "valid_loss" for a title, or "epoch/loss" beside "step/loss". */
export function titled(streams) {
  const pairs = streams.flatMap(({ stream, metrics }) => metrics.map((metric) => ({ stream, metric })));
  const names = pairs.map((one) => one.metric);
  const isAlone = ({ stream, metric }) => PHASES[stream] && names.indexOf(metric) === names.lastIndexOf(metric);
  const named = pairs.map((one) => ({ ...one, title: isAlone(one) ? one.metric : `${one.stream}/${one.metric}` }));
  const order = Object.keys(PHASES);
  const rank = (one) => (one.title === one.metric ? -1 : order.indexOf(one.stream.split("/")[0]));
  return named.sort((a, b) => rank(a) - rank(b) || (a.title < b.title ? -1 : 1));
}

/** What the first parts of titles say of when a metric was measured: "epoch/ means of an epoch's steps". */
export function phases(metrics) {
  const shown = new Set(metrics.filter((one) => one.title !== one.metric).map((one) => one.stream.split("/")[0]));
  return [...shown].filter((phase) => PHASES[phase]).map((phase) => `${phase}/ ${PHASES[phase]}`).join("  ·  ");
}

/** A value of a record as text; a list of strings has a line for each. */
export function words(value) {
  if (value === undefined) return "–";
  if (typeof value === "string") return value;
  if (Array.isArray(value) && value.length && value.every((one) => typeof one === "string")) return value.join("\n");
  return JSON.stringify(value);
}

/** The best values of metrics whose name says which value is better: [{name, value, step}]. */
export function bests(run) {
  const title = new Map(titled(run.streams).map((one) => [`${one.stream}/${one.metric}`, one.title]));
  const name = (one) => title.get(`${one.phase}/${one.name}`) ?? `${one.phase}/${one.name}`;
  return run.metrics.filter((one) => one.best !== null).map((one) => ({ name: name(one), value: one.best, step: one.best_step }));
}
