// What both kinds of chart share: title, plot, names, and how they are saved as a picture and a table.

import { made } from "./dom.js";
import { markShape } from "./drawing.js";
import { FONT, colour, darkQuery, dash, ink } from "./looks.js";
import { plain } from "./words.js";

function frame(parent) {
  parent.replaceChildren();
  const parts = { head: made("div", "chart-head"), plot: made("div", "chart-plot"), legend: made("div", "chart-legend") };
  parts.title = made("span", "chart-title");
  parts.reading = made("span", "chart-reading");
  parts.head.append(parts.title, parts.reading);
  parent.classList.add("chart");
  parent.append(parts.head, parts.plot, parts.legend);
  return parts;
}

/** What both kinds of chart share: made again when the theme changes, resized with its element. */
export function kept(parent, data, options, make) {
  const parts = frame(parent);
  const state = { data, options: { height: 190, ...options }, parts, plot: null };
  const build = () => {
    state.plot?.destroy();
    state.plot = make(state);
  };
  const resized = new ResizeObserver(() => {
    const width = parts.plot.clientWidth;
    if (state.plot && width && width !== state.plot.width) state.plot.setSize({ width, height: state.options.height });
  });
  build();
  resized.observe(parts.plot);
  darkQuery?.addEventListener("change", build);
  return {
    state,
    build,
    destroy() {
      resized.disconnect();
      darkQuery?.removeEventListener("change", build);
      state.plot?.destroy();
      parent.replaceChildren();
    },
    async png() {
      const { width, height } = state.plot;
      state.plot.setSize({ width: Math.max(width, LEAST.width), height: Math.max(height, LEAST.height) });
      await null; // it draws when this script has ended, and nothing is seen of that
      const found = picture(state);
      state.plot.setSize({ width, height });
      return found;
    },
  };
}

const LEAST = { width: 960, height: 380 }; // of a saved picture
const NAME = 230; // pixels for a name below it
const EDGE = 12;

/** The chart with its title, its names and what its marks mean as one PNG. */
function picture({ plot, data, series, options }) {
  const ratio = devicePixelRatio;
  const look = ink();
  const listed = series ?? [];
  const columns = Math.floor(plot.width / NAME);
  const rows = Math.ceil(listed.length / columns);
  const canvas = document.createElement("canvas");
  canvas.width = plot.ctx.canvas.width + 2 * EDGE * ratio;
  const kinds = [...new Set((data.marks ?? []).map((mark) => mark.kind))];
  canvas.height = plot.ctx.canvas.height + (34 + 18 * (rows + (kinds.length > 0))) * ratio;
  const context = canvas.getContext("2d");
  context.fillStyle = look.back;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(plot.ctx.canvas, EDGE * ratio, 26 * ratio);
  context.scale(ratio, ratio);
  context.fillStyle = look.strong;
  context.font = `600 13px ${FONT}`;
  context.fillText(plain(data.title) + (options.smooth ? ` (smoothing ${options.smooth})` : ""), EDGE, 18);
  context.font = `12px ${FONT}`;
  listed.forEach((one, i) => {
    const x = EDGE + NAME * (i % columns);
    const y = plot.ctx.canvas.height / ratio + 26 + 12 + 18 * Math.floor(i / columns);
    context.strokeStyle = colour(one.slot);
    context.lineWidth = 2.5;
    context.setLineDash(dash(one.slot));
    context.beginPath();
    context.moveTo(x, y - 4);
    context.lineTo(x + 22, y - 4);
    context.stroke();
    context.fillText(plain(one.label), x + 30, y, NAME - 40);
  });
  context.setLineDash([]);
  context.fillStyle = look.text;
  let left = 16;
  for (const kind of kinds) {
    const y = canvas.height / ratio - 14;
    context.fillStyle = context.strokeStyle = look.text;
    context.lineWidth = 1.5;
    markShape(context, kind, left, y - 4, 4);
    context.fillText(kind, left + 10, y);
    left += 28 + context.measureText(kind).width;
  }
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

/** Text that no spreadsheet takes for a formula. */
const cell = (value) => {
  const text = String(value);
  if (typeof value !== "string" || /^\w[\w ./-]*$/.test(text)) return text;
  // In quotes also without a comma: a spreadsheet may take ";" or a tab for the end of a cell.
  const safe = text.replaceAll(/(^|[\n\r]+)(?=[ \t]*[=+\-@|\uff0b\uff0d\uff1d\uff20])/g, "$1'");
  return `"${safe.replaceAll('"', '""')}"`;
};

/** Rows as a file for spreadsheets. */
export const csv = (rows) => new Blob([rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n"], { type: "text/csv" });
