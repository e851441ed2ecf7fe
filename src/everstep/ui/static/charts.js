// Charts: data in, drawing out.  This file fetches nothing; it needs the script vendor/uPlot.iife.min.js (global
// `uPlot`), charts.css and vendor/uPlot.min.css.
//
// lineChart(element, data, options) draws into an empty element and gives {update, destroy, png, csv}.
//
//   data = {
//     title: "train/loss",
//     x: "step" or "time" (seconds since the run was made),
//     series: [{
//       label: "digits-1a2b3c", slot: 0 (optional: which colour and dash; else its place in the list),
//       n: 10000 (values before the server reduced them),
//       x: [...], min: [...], max: [...], last: [...] (numbers, or "NaN", "Infinity", "-Infinity"),
//       whole: {x, last} (optional: the line over the whole axis, if this is a part of it),
//       superseded: [[x, value], ...] (optional: values of steps that were executed again), n_superseded: how many there are
//       nonfinite: [[x, value], ...] (optional: NaN and infinities, where x and last may lack some), n_nonfinite: how many there are
//     }],
//     marks: [{x, kind: "killed" | "stopped" | "failed" | "resumed" | "rolled back" | "diverged", words}]
//   }
//   options = {
//     smooth: 0 to 0.99, logX, logY, superseded: show those values, height: pixels,
//     from, to: the visible part of the x axis (null: all), onZoom(from, to): asked for another part,
//     legend: names under the chart (default: where there are 2 to 12 series), pick(index): a click on a series
//   }

import { ALIKE, LARGEST, areAlike, axis, between, yRange } from "./axes.js";
import { csv, kept } from "./chart_frame.js";
import { made } from "./dom.js";
import { MANY, drawExtremes, drawMarks, drawName, drawNotFinite, drawSuperseded, shown, trace } from "./drawing.js";
import { colour, dash, ink, swatch } from "./looks.js";
import { count, duration, format, numberOf, plain } from "./words.js";

const CELLS = 3e6; // above this size of the shared table, x is rounded to a raster, finer than a pixel
const RASTER = 4096;
const FEW = 30; // a line of fewer points shows each
const LISTED = 10; // values beside the pointer

export const place = (kind, x) => (kind === "time" ? duration(x) : `step ${format(Math.round(x))}`);

/**
 * Exponential moving average without the bias of its first values; gaps stay gaps.  It forgets by distance on the axis, and
 * begins where `whole` begins: so a value does not depend on the part of the axis that is seen.
 */
export function smoothed(x, values, weight, whole) {
  if (!weight) return values;
  if (!whole?.x.length) whole = { x, values };
  const apart = (whole.x.at(-1) - whole.x[0]) / (whole.x.length - 1) || 1;
  let sum = 0;
  let mass = 0;
  let before = Math.min(x[0], whole.x[0]) - apart;
  let share = 0;
  const next = (at, value) => {
    if (!Number.isFinite(value)) return value;
    const keep = weight ** ((at - before) / apart);
    if (at > before) share = 1 - keep; // several at one place count alike
    before = at;
    sum = sum * keep + value * share;
    mass = mass * keep + share;
    return sum / mass;
  };
  for (let i = 0; whole.x[i] < x[0]; i++) next(whole.x[i], whole.values[i]);
  return values.map((value, i) => next(x[i], value));
}

// -------------------------------------------------------------------------------------------- data

const isOdd = (value) => value !== null && value !== undefined && !Number.isFinite(value);

function prepared(series, options) {
  return series.map((one, at) => {
    const last = one.last.map(numberOf);
    const x = one.x.map(numberOf);
    return {
      label: one.label,
      slot: one.slot ?? at,
      n: one.n ?? x.length,
      old: one.n_superseded ?? one.superseded?.length ?? 0,
      x,
      last,
      min: (one.min ?? one.last).map(numberOf),
      max: (one.max ?? one.last).map(numberOf),
      line: smoothed(x, last, options.smooth, one.whole && { x: one.whole.x, values: one.whole.last.map(numberOf) }),
      superseded: (one.superseded ?? []).map(([at, value]) => [numberOf(at), numberOf(value)]),
      odd: one.n_nonfinite,
      nonfinite: (one.nonfinite ?? x.map((at, i) => [at, last[i]])).map((pair) => pair.map(numberOf)).filter(([, value]) => isOdd(value)),
    };
  });
}

/** One table for uPlot: a shared x, and a column for each series; undefined where a series has no value. */
function table(series, { logX, superseded }) {
  const all = new Set();
  for (const one of series) {
    for (const x of one.x) if (!logX || x > 0) all.add(x);
    if (superseded) for (const [x] of one.superseded) if (!logX || x > 0) all.add(x); // they may lie beyond the line
  }
  let xs = Float64Array.from(all).sort();
  if (xs.length * series.length > CELLS) xs = raster(xs, logX);
  const columns = series.map((one) => {
    const column = new Array(xs.length);
    for (let i = 0, at = 0; i < one.x.length; i++) {
      if (logX && one.x[i] <= 0) continue;
      while (at < xs.length - 1 && Math.abs(xs[at + 1] - one.x[i]) <= Math.abs(xs[at] - one.x[i])) at++;
      column[at] = Number.isFinite(one.line[i]) ? one.line[i] : null;
    }
    return column;
  });
  return [Array.from(xs), ...columns];
}

function raster(xs, logX) {
  const scale = logX ? Math.log : (x) => x;
  const back = logX ? Math.exp : (x) => x;
  const first = scale(xs[0]);
  const step = (scale(xs[xs.length - 1]) - first) / (RASTER - 1);
  return Float64Array.from({ length: RASTER }, (_, i) => back(first + i * step));
}

/** Least and greatest value in the visible part, of the extremes and not of the line alone. */
function extent(series, from, to, options) {
  let low = Infinity;
  let high = -Infinity;
  const take = (value) => {
    if (!Number.isFinite(value) || (options.logY && value <= 0)) return;
    if (value < low) low = value;
    if (value > high) high = value;
  };
  for (const one of series) {
    for (let i = 0; i < one.x.length; i++) {
      if (one.x[i] >= from && one.x[i] <= to) take(one.min[i]), take(one.max[i]), take(one.line[i]);
      for (const end of [from, to]) if (one.x[i] < end && one.x[i + 1] > end) take(crossing(one, i, end));
    }
    if (options.superseded) for (const [x, value] of one.superseded) if (x >= from && x <= to) take(value);
  }
  return low <= high ? [low, high] : null;
}

/** Where a line crosses an edge of the visible part, between two of its points. */
const crossing = ({ x, line }, i, edge) => line[i] + ((line[i + 1] - line[i]) * (edge - x[i])) / (x[i + 1] - x[i]);

/** Index of the value of a sorted list that is nearest to x. */
function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}

// ------------------------------------------------------------------------------------ line charts

/** Whether a place lies in the part of the axis that was chosen: lines go on beyond it. */
const isSeen = (x, { from, to }) => x >= (from ?? -Infinity) && x <= (to ?? Infinity);

export function lineChart(parent, data, options = {}) {
  const chart = kept(parent, data, options, makeLines);
  const { state } = chart;
  state.parts.plot.tabIndex = 0;
  state.parts.plot.addEventListener("keydown", (event) => pressed(event, state));
  return {
    ...chart,
    update(data, options = {}) {
      const before = state.options;
      state.data = data;
      state.options = { ...before, ...options };
      const same = ["logX", "logY", "height"].every((name) => before[name] === state.options[name]);
      const alike = data.x === state.kind && data.series.length === state.series.length;
      same && alike ? refresh(state) : chart.build();
    },
    csv: () =>
      csv([
        ["series", data.x, "min", "max", "last", "superseded"],
        ...state.series.flatMap((one) => [
          ...one.x.flatMap((x, i) => (isSeen(x, state.options) ? [[one.label, x, one.min[i], one.max[i], one.last[i], 0]] : [])),
          ...one.superseded.map(([x, value]) => [one.label, x, value, value, value, 1]),
        ]),
      ]),
  };
}

function makeLines(state) {
  const { data, options, parts } = state;
  const uPlot = globalThis.uPlot;
  state.series = prepared(data.series, options);
  state.kind = data.x;
  const thin = data.series.length > 20 ? 1 : 1.6;
  const settings = {
    width: parts.plot.clientWidth || 400,
    height: options.height,
    padding: [14, 18, 0, 0], // half of the last tick's words is right of the plot
    legend: { show: false },
    scales: {
      x: { time: false, distr: options.logX ? 3 : 1, range: (u, low, high) => xRange(state, low, high) },
      y: { distr: options.logY ? 3 : 1, range: (u) => yRange(visible(u, state), state.options.logY) },
    },
    axes: [axis(2, options.logX, data.x), axis(3, options.logY, "value")],
    series: [
      {},
      ...state.series.map((one) => ({
        stroke: colour(one.slot),
        width: thin,
        dash: dash(one.slot),
        points: { show: one.x.length < FEW && data.series.length <= MANY, size: 5, fill: colour(one.slot) },
      })),
    ],
    cursor: {
      y: false,
      points: { show: false },
      drag: { x: true, y: false, setScale: false },
      sync: { key: `everstep-${data.x}`, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      bind: { dblclick: () => () => zoom(state, null, null) },
    },
    hooks: {
      drawAxes: [(u) => drawExtremes(u, state.series, state.options)],
      draw: [
        (u) => {
          if (state.options.superseded) drawSuperseded(u, state.series);
          drawNotFinite(u, state.series);
          drawMarks(u, state.data.marks ?? []);
          drawName(u, state.kind);
        },
      ],
      setCursor: [(u) => point(u, state)],
      setSelect: [(u) => selected(u, state)],
      setSize: [(u) => state.over && sizeOver(u, state)],
    },
  };
  const plot = new uPlot(settings, table(state.series, options), parts.plot);
  state.over = plot.over.appendChild(made("canvas", "chart-over"));
  state.listed = plot.over.appendChild(made("div", "chart-list"));
  state.listed.hidden = true;
  sizeOver(plot, state);
  if (options.pick) plot.over.addEventListener("click", () => state.near !== null && state.options.pick(state.near));
  describe(state);
  return plot;
}

function refresh(state) {
  state.series = prepared(state.data.series, state.options);
  state.plot.setData(table(state.series, state.options), true);
  describe(state);
}

function xRange(state, low, high) {
  const { logX } = state.options;
  const chosen = (end) => (end === null || end === undefined || (logX && end <= 0) ? null : between(-LARGEST, end, LARGEST));
  const first = chosen(state.options.from) ?? low;
  const last = chosen(state.options.to) ?? high;
  if (first === null || last === null) return [logX ? 1 : 0, 1 + Number(Boolean(logX))];
  if (!areAlike(first, last)) return roomy(first, last, state.options);
  const pad = Math.max(0.5, Math.abs(first) * ALIKE);
  return [first - (logX ? first / 2 : pad), Math.max(first, last) + pad];
}

/** A range whose ends nobody chose has room for the shapes of its first and last points. */
function roomy(first, last, { from, to, logX }) {
  const room = 0.015;
  const beside = (end, other) => (logX ? end * (end / other) ** room : end + (end - other) * room);
  const isChosen = (end) => end !== null && end !== undefined;
  return [isChosen(from) ? first : beside(first, last), isChosen(to) ? last : beside(last, first)];
}

/** Extent of the x range that the data will have: while uPlot sets its scales, `u.scales.x` is that of the last data. */
function visible(u, state) {
  const xs = u.data[0];
  return extent(state.series, ...xRange(state, xs[0] ?? null, xs.at(-1) ?? null), state.options);
}

function zoom(state, from, to) {
  Object.assign(state.options, { from, to });
  state.plot.setData(state.plot.data, true);
  state.options.onZoom?.(from, to);
}

const MOVES = { ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "-": [-0.3, 0.3] };

/** What a drag does, by keys: the arrows move the visible part of the x axis, + and - change its width, 0 shows all. */
function pressed(event, state) {
  if (event.ctrlKey || event.altKey || event.metaKey || !(event.key === "0" || event.key in MOVES)) return;
  if (!state.plot) return;
  event.preventDefault();
  if (event.key === "0") return zoom(state, null, null);
  const { min, max } = state.plot.scales.x;
  const move = (low, high, at) => [low, high][at] + MOVES[event.key][at] * (high - low);
  const { logX } = state.options;
  zoom(state, ...[0, 1].map((at) => (logX ? 10 ** move(Math.log10(min), Math.log10(max), at) : move(min, max, at))));
}

function selected(u, state) {
  const { left, width } = u.select;
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  if (width < 4) return;
  zoom(state, u.posToVal(left, "x"), u.posToVal(left + width, "x"));
}

function sizeOver(u, state) {
  const ratio = devicePixelRatio;
  state.over.width = u.bbox.width;
  state.over.height = u.bbox.height;
  state.over.style.width = `${u.bbox.width / ratio}px`;
  state.over.style.height = `${u.bbox.height / ratio}px`;
}

let pointed = null; // the line under the pointer, which the charts that follow show, too

/** A chart that follows the pointer in another one is drawn after that one has said which line is meant. */
function point(u, state) {
  if (u.over.matches(":hover") || u.cursor.left < 0) return drawPoint(u, state);
  state.frame ??= requestAnimationFrame(() => {
    state.frame = null;
    if (state.plot === u && u.over.isConnected) drawPoint(u, state);
  });
}

/** The value under the pointer, in words above the chart; its line is drawn stronger. */
function drawPoint(u, state) {
  const context = state.over?.getContext("2d");
  context?.clearRect(0, 0, state.over.width, state.over.height);
  state.near = null;
  const near = u.cursor.left < 0 || u.cursor.idx === null ? [] : nearby(u, state, u.posToVal(u.cursor.left, "x"));
  list(u, state, near);
  const isHere = u.over.matches(":hover");
  const found = (!isHere && near.find(({ at }) => state.series[at].label === pointed)) || near[0];
  if (isHere) pointed = found ? state.series[found.at].label : null;
  if (!found) return read(state, latest(state));
  state.near = found.at;
  const one = state.series[found.at];
  if (context && state.series.length > 1) highlight(u, state, one, context);
  const mark = (state.data.marks ?? []).find((each) => Math.abs(u.valToPos(each.x, "x") - u.cursor.left) < 5);
  const wide = one.min[found.i] !== one.max[found.i];
  read(state, {
    slot: one.slot,
    words: [
      mark?.words,
      state.series.length > 1 ? one.label : null,
      place(state.kind, one.x[found.i]),
      format(one.last[found.i]) + (wide ? ` (${format(one.min[found.i])} to ${format(one.max[found.i])})` : ""),
      state.options.smooth ? `smooth ${format(one.line[found.i])}` : null,
    ],
  });
}

/** The value of each series at the pointer's x: {at: the series, i: its point, distance: in pixels}, nearest first. */
function nearby(u, state, x) {
  const found = [];
  state.series.forEach((one, at) => {
    if (!one.x.length) return;
    const i = nearest(one.x, x);
    if (Math.abs(u.valToPos(one.x[i], "x") - u.cursor.left) > 40 && state.series.length > 1) return;
    const distance = Math.abs(u.valToPos(one.line[i], "y") - u.cursor.top);
    found.push({ at, i, distance: Number.isFinite(distance) ? distance : Number.MAX_VALUE });
  });
  return found.sort((a, b) => a.distance - b.distance);
}

/** The values of all series beside the pointer; in the chart that it is in, and not in those that follow it. */
function list(u, state, near) {
  const box = state.listed;
  if (!box) return;
  box.hidden = state.series.length < 2 || !near.length || !u.over.matches(":hover");
  if (box.hidden) return;
  const rows = near.slice(0, LISTED).map(({ at, i }) => {
    const one = state.series[at];
    return made("div", "chart-name", swatch(one.slot), made("b", "", format(one.last[i])), made("span", "", one.label));
  });
  if (near.length > LISTED) rows.push(made("div", "chart-note", `and ${count(near.length - LISTED, "run")} more`));
  box.replaceChildren(made("div", "chart-note", place(state.kind, state.series[near[0].at].x[near[0].i])), ...rows);
  const right = u.cursor.left < u.over.clientWidth / 2;
  box.style.left = right ? `${u.cursor.left + 14}px` : "auto";
  box.style.right = right ? "auto" : `${u.over.clientWidth - u.cursor.left + 14}px`;
}

function highlight(u, state, one, context) {
  const ratio = devicePixelRatio;
  context.save();
  context.scale(ratio, ratio);
  for (const [style, width] of [[ink().back, 5], [colour(one.slot), 2.5]]) {
    context.strokeStyle = style;
    context.lineWidth = width;
    trace(u, one.x, one.line, state.options, context, false);
  }
  if (one.x.length < FEW) dots(u, one, state.options, context);
  context.restore();
}

function dots(u, one, options, context) {
  context.fillStyle = colour(one.slot);
  one.x.forEach((x, i) => {
    if (!shown(x, one.line[i], options)) return;
    context.beginPath();
    context.arc(u.valToPos(x, "x"), u.valToPos(one.line[i], "y"), 3, 0, 2 * Math.PI);
    context.fill();
  });
}

function latest(state) {
  const [one] = state.series;
  const old = state.series.reduce((sum, each) => sum + each.old, 0);
  if (state.series.every((each) => !each.x.length)) return { slot: null, words: [old ? `all ${count(old, "value")} superseded` : "no values"] };
  if (state.series.length > 1) return { slot: null, words: [count(state.series.length, "run")] };
  const at = one.x.findLastIndex((x) => isSeen(x, state.options));
  return { slot: null, words: at < 0 ? ["no values here"] : [place(state.kind, one.x[at]), format(one.last[at])] };
}

function read(state, { slot, words }) {
  const reading = state.parts.reading;
  reading.replaceChildren(...(slot === null || state.series.length < 2 ? [] : [swatch(slot)]), plain(words.filter(Boolean).join("  ·  ")));
  reading.title = reading.textContent;
}

function describe(state) {
  const { parts, data, series } = state;
  parts.title.textContent = parts.title.title = plain(data.title);
  const odd = series.reduce((sum, one) => sum + (one.odd ?? one.nonfinite.length), 0);
  const hidden = state.options.logY ? series.reduce((sum, one) => sum + one.last.filter((value) => value <= 0).length, 0) : 0;
  const old = series.reduce((sum, one) => sum + one.old, 0);
  const none = state.options.superseded && !old ? "none was written" : "";
  const notes = [none, odd ? `${format(odd)} not finite` : "", hidden ? `${hidden} at or below 0 not on the log axis` : ""].filter(Boolean);
  if (notes.length) parts.title.append(" ", made("small", "chart-note", notes.join(", ")));
  read(state, latest(state));
  parts.plot.setAttribute("role", "img");
  parts.plot.setAttribute("aria-label", `${data.title}: ${series.length > 1 ? `${series.length} runs` : latest(state).words.join(", ")}`);
  const named = state.options.legend ?? (series.length > 1 && series.length <= MANY);
  parts.legend.replaceChildren(...(named ? series.map(legendItem) : []));
}

function legendItem(one) {
  const item = made("span", "chart-name");
  item.append(swatch(one.slot), made("span", "", one.label));
  item.title = one.label;
  return item;
}
