// What a chart draws besides its lines: extremes, superseded values, values that are not finite, marks.

import { FONT, colour, ink } from "./looks.js";

export const MANY = 12; // above this number of series, extremes are strokes and names are left to the pointer

/** Extremes behind the lines: a band for a few series, strokes for many; and the raw values of smooth lines. */
export function drawExtremes(u, series, options) {
  const context = u.ctx;
  const many = series.length > MANY;
  clipped(u, () => {
    for (const one of series) {
      const reduced = one.x.some((_, i) => one.min[i] !== one.max[i]);
      context.strokeStyle = context.fillStyle = colour(one.slot);
      context.lineWidth = devicePixelRatio;
      if (reduced) {
        context.globalAlpha = many ? 0.25 : 0.16;
        many ? strokes(u, one, options) : band(u, one, options);
      }
      if (options.smooth && !many) {
        context.globalAlpha = 0.35;
        trace(u, one.x, one.last, options);
      }
    }
  });
}

export function clipped(u, draw) {
  const { ctx: context, bbox } = u;
  context.save();
  context.beginPath();
  context.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  context.clip();
  draw();
  context.restore();
}

export const shown = (x, y, options) => Number.isFinite(y) && !(options.logY && y <= 0) && !(options.logX && x <= 0);

function band(u, one, options) {
  const context = u.ctx;
  let from = 0;
  const fill = (end) => {
    if (end - from > 1) {
      context.beginPath();
      for (let i = from; i < end; i++) context.lineTo(u.valToPos(one.x[i], "x", true), u.valToPos(one.max[i], "y", true));
      for (let i = end - 1; i >= from; i--) context.lineTo(u.valToPos(one.x[i], "x", true), u.valToPos(one.min[i], "y", true));
      context.fill();
    }
  };
  for (let i = 0; i < one.x.length; i++) {
    if (!shown(one.x[i], one.min[i], options) || !Number.isFinite(one.max[i])) fill(i), (from = i + 1);
  }
  fill(one.x.length);
}

function strokes(u, one, options) {
  const context = u.ctx;
  context.beginPath();
  for (let i = 0; i < one.x.length; i++) {
    if (!shown(one.x[i], one.min[i], options) || one.min[i] === one.max[i]) continue;
    const x = u.valToPos(one.x[i], "x", true);
    context.moveTo(x, u.valToPos(one.min[i], "y", true));
    context.lineTo(x, u.valToPos(one.max[i], "y", true));
  }
  context.stroke();
}

export function trace(u, xs, ys, options, context = u.ctx, canvas = true) {
  context.beginPath();
  let open = false;
  for (let i = 0; i < xs.length; i++) {
    if (!shown(xs[i], ys[i], options)) {
      open = open && ys[i] === undefined;
      continue;
    }
    const x = u.valToPos(xs[i], "x", canvas);
    const y = u.valToPos(ys[i], "y", canvas);
    open ? context.lineTo(x, y) : context.moveTo(x, y);
    open = true;
  }
  context.stroke();
}

/** Values of steps that were executed again: hollow rings. */
export function drawSuperseded(u, series) {
  const context = u.ctx;
  clipped(u, () => {
    context.lineWidth = devicePixelRatio;
    for (const one of series) {
      context.strokeStyle = colour(one.slot);
      for (const [x, value] of one.superseded) {
        if (!Number.isFinite(value)) continue;
        context.beginPath();
        context.arc(u.valToPos(x, "x", true), u.valToPos(value, "y", true), 4 * devicePixelRatio, 0, 2 * Math.PI);
        context.stroke();
      }
    }
  });
}

/** Values that are not finite stand at the edge: a cross for NaN, a triangle for an infinity. */
export function drawNotFinite(u, series) {
  const { ctx: context, bbox } = u;
  const size = 4 * devicePixelRatio;
  clipped(u, () => {
    context.lineWidth = 1.5 * devicePixelRatio;
    for (const one of series) {
      context.strokeStyle = context.fillStyle = colour(one.slot);
      one.nonfinite.forEach(([at, value]) => {
        const top = value === Infinity;
        const x = u.valToPos(at, "x", true);
        const y = top ? bbox.top + size : bbox.top + bbox.height - size;
        Number.isNaN(value) ? cross(context, x, y, size * 0.8) : triangle(context, x, y, top ? size : -size);
      });
    }
  });
}

function cross(context, x, y, size) {
  context.beginPath();
  context.moveTo(x - size, y - size);
  context.lineTo(x + size, y + size);
  context.moveTo(x + size, y - size);
  context.lineTo(x - size, y + size);
  context.stroke();
}

function triangle(context, x, y, size) {
  context.beginPath();
  context.moveTo(x, y - size);
  context.lineTo(x + size, y + size);
  context.lineTo(x - size, y + size);
  context.fill();
}

/** The name of the x axis, left of its first tick if there is room. */
export function drawName(u, kind) {
  const { ctx: context, bbox } = u;
  context.save();
  context.fillStyle = ink().text;
  context.font = `${11 * devicePixelRatio}px ${FONT}`;
  context.textAlign = "left"; // the axes leave another
  context.textBaseline = "top";
  const end = context.measureText(kind).width + 4 * devicePixelRatio;
  const [first] = u.axes[0]._splits ?? [];
  const words = u.axes[0]._values?.[0] ?? "";
  const begin = first === undefined ? Infinity : u.valToPos(first, "x", true) - context.measureText(words).width / 2;
  if (begin > end) context.fillText(kind, 0, bbox.top + bbox.height + 8 * devicePixelRatio);
  context.restore();
}

/** Where the run was killed, resumed or rolled back: a thin line with a shape on top. */
export function drawMarks(u, marks) {
  const { ctx: context, bbox } = u;
  const look = ink();
  let taken = -Infinity; // shapes that would cover one another stand side by side
  for (const mark of [...marks].sort((a, b) => a.x - b.x)) {
    const x = Math.round(u.valToPos(mark.x, "x", true));
    if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
    const bad = mark.kind === "killed" || mark.kind === "failed" || mark.kind === "diverged";
    context.save();
    context.strokeStyle = context.fillStyle = bad ? look.bad : look.text;
    context.lineWidth = devicePixelRatio;
    context.globalAlpha = 0.6;
    context.setLineDash(mark.kind === "resumed" ? [] : [3 * devicePixelRatio, 3 * devicePixelRatio]);
    context.beginPath();
    context.moveTo(x, bbox.top);
    context.lineTo(x, bbox.top + bbox.height);
    context.stroke();
    context.globalAlpha = 1;
    context.setLineDash([]);
    context.lineWidth = 1.5 * devicePixelRatio;
    taken = Math.max(x, taken + 10 * devicePixelRatio);
    markShape(context, mark.kind, taken, bbox.top - 7 * devicePixelRatio, 4 * devicePixelRatio);
    context.restore();
  }
}

export function markShape(context, kind, x, y, size) {
  if (kind === "killed") return cross(context, x, y, size * 0.9);
  context.beginPath();
  if (kind === "resumed") {
    context.arc(x, y, size * 0.8, 0, 2 * Math.PI);
    context.fill();
  } else if (kind === "rolled back") {
    context.moveTo(x - size, y);
    context.lineTo(x + size, y - size);
    context.lineTo(x + size, y + size);
    context.fill();
  } else if (kind === "diverged") {
    for (const line of [-1.5, 1.5]) context.moveTo(x - size, y + line * devicePixelRatio), context.lineTo(x + size, y + line * devicePixelRatio);
    context.moveTo(x - size / 2, y + size);
    context.lineTo(x + size / 2, y - size);
    context.stroke();
  } else if (kind === "failed") {
    context.fillRect(x - size * 0.25, y - size, size * 0.5, size * 1.2); // "!", as in the timeline
    context.fillRect(x - size * 0.25, y + size * 0.5, size * 0.5, size * 0.5);
  } else {
    for (const side of [-0.75, 0.25]) context.fillRect(x + size * side, y - size, size * 0.5, size * 2); // a pause
  }
}
