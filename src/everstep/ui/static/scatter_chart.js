// scatterChart(element, data, options) draws points, and gives {update, destroy, png, csv}:
//   data = {title, xName, yName, points: [{label, x, y, slot}]}   options = {logX, logY, height, pick(index)}

import { axis, yRange } from "./axes.js";
import { csv, kept } from "./chart_frame.js";
import { clipped, shown } from "./drawing.js";
import { colour } from "./looks.js";
import { count, format, plain } from "./words.js";

export function scatterChart(parent, data, options = {}) {
  const chart = kept(parent, data, options, makePoints);
  const { state } = chart;
  return {
    ...chart,
    update(data, options = {}) {
      state.data = data;
      Object.assign(state.options, options);
      chart.build();
    },
    csv: () => csv([["run", state.data.xName, state.data.yName], ...state.data.points.map((one) => [one.label, one.x, one.y])]),
  };
}

function makePoints(state) {
  const { data, options, parts } = state;
  const points = data.points
    .map((one, at) => ({ ...one, at }))
    .filter((one) => shown(one.x, one.y, options) && Number.isFinite(one.x))
    .sort((a, b) => a.x - b.x);
  const around = (log) => (u, low, high) => yRange(low === null ? null : [low, high], log);
  const settings = {
    width: parts.plot.clientWidth || 400,
    height: options.height,
    padding: [14, 14, 0, 0],
    legend: { show: false },
    scales: {
      x: { time: false, distr: options.logX ? 3 : 1, range: around(options.logX) },
      y: { distr: options.logY ? 3 : 1, range: around(options.logY) },
    },
    axes: [axis(2, options.logX, "value"), axis(3, options.logY, "value")],
    series: [{}, { paths: () => null, points: { show: false } }],
    cursor: { points: { show: false }, drag: { x: false, y: false } },
    hooks: {
      draw: [(u) => clipped(u, () => points.forEach((one) => dot(u, one)))],
      setCursor: [(u) => hover(u, state, points)],
    },
  };
  parts.title.textContent = plain(data.title);
  const plot = new globalThis.uPlot(settings, [points.map((one) => one.x), points.map((one) => one.y)], parts.plot);
  if (options.pick) plot.over.addEventListener("click", () => state.near !== null && options.pick(state.near));
  const left = data.points.length - points.length;
  parts.reading.textContent = `${count(points.length, "run")}${left ? `, ${left} without both values` : ""}`;
  return plot;
}

function dot(u, one) {
  const context = u.ctx;
  context.fillStyle = context.strokeStyle = colour(one.slot ?? 0);
  context.beginPath();
  context.arc(u.valToPos(one.x, "x", true), u.valToPos(one.y, "y", true), 3.5 * devicePixelRatio, 0, 2 * Math.PI);
  context.globalAlpha = 0.55;
  context.fill();
  context.globalAlpha = 1;
  context.stroke();
}

function hover(u, state, points) {
  state.near = null;
  if (u.cursor.left < 0) return;
  let best = 24;
  let found = null;
  for (const one of points) {
    const distance = Math.hypot(u.valToPos(one.x, "x") - u.cursor.left, u.valToPos(one.y, "y") - u.cursor.top);
    if (distance < best) [best, found] = [distance, one];
  }
  if (!found) return;
  state.near = found.at;
  const { xName, yName } = state.data;
  state.parts.reading.textContent = `${plain(found.label)}  ·  ${xName} ${format(found.x)}  ·  ${yName} ${format(found.y)}`;
}
