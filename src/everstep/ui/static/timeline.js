// The timeline of a run: a row for each start, with what ended it and whether its resume was verified.
// Data in, drawing out: this file fetches nothing; it needs charts.css.
//
// drawTimeline(element, run) draws into the element, and may be called again with newer data.
//   run = {
//     name: "digits-1a2b3c", step: 810,
//     starts: [{number: 1, started: unix seconds, last: unix seconds, zero: less these, a time is that in which the run was alive, from_step: 0, step: 812,
//               status: "killed" | "finished" | "stopped" | "failed" | "running", reason: "..." or null,
//               badge: "first" | "verified" | "not verified" | "nothing to verify" | "diverged",
//               diverged_at: null or N, how: "...",
//               again: steps that were compared with their first execution (optional)}],
//     rollbacks: [{step, to, reason, segment: number of the start}]
//   }
//
// timelinePng(run): the same as a picture, a promise of a blob.
//
// marks(run, x): the marks for a chart, in steps (x = "step") or seconds in which the run was alive (x = "time").

import { made } from "./dom.js";
import { FILLED, ICONS, icon } from "./icons.js";
import { FONT, colour, ink } from "./looks.js";
import { clock, duration, format, plain } from "./words.js";

const BAD = new Set(["killed", "failed"]);
const isBad = (sign) => BAD.has(sign) || sign === "diverged";

const number = (step) => format(Math.round(step));

/** A number of a run's files, which may hold anything. */
const finite = (value, other = 0) => (Number.isFinite(value) ? value : other);

/** What a badge says, in words. */
function badgeWords(start) {
  if (start.badge === "diverged") return start.diverged_at === null ? "diverged" : `diverged at ${number(start.diverged_at)}`;
  return start.badge === "first" ? "first start" : start.badge;
}

/**
 * The starts, with the last step of each as far as it is known: a killed start wrote its last step no more, but
 * the next one met its traces.
 */
function known(starts) {
  return starts.map((start, i) => {
    const next = starts[i + 1];
    const met = finite(next?.again) ? finite(next.from_step) + next.again : 0;
    return { ...start, from_step: finite(start.from_step), diverged_at: finite(start.diverged_at, null), step: Math.max(finite(start.step), met) };
  });
}

/** Marks for a chart of this run. */
export function marks(run, x) {
  const found = [];
  known(run.starts).forEach((start, i) => {
    if (i > 0) {
      const words = `resumed from step ${number(start.from_step)}: ${badgeWords(start)}`;
      const kind = start.badge === "diverged" ? "diverged" : "resumed";
      found.push({ x: x === "time" ? start.started - start.zero : start.from_step, kind, words });
    }
    if (["killed", "stopped", "failed"].includes(start.status)) {
      const at = x === "time" ? (start.last ?? start.started) - start.zero : start.step;
      found.push({ x: at, kind: start.status, words: `${start.status} at step ${number(start.step)}` });
    }
  });
  if (x === "step") {
    for (const one of (run.rollbacks ?? []).filter((each) => Number.isFinite(each.step))) {
      found.push({ x: one.step, kind: "rolled back", words: `rolled back from step ${number(one.step)} to ${number(one.to)}` });
    }
  }
  return found;
}

// ------------------------------------------------------------------------------------------- rows

/**
 * What is drawn: {last: the last step, ticks: steps, rows}; a row is
 * {title, words, bad, when, why, parts: [{kind, state, from, to, words}], signs: [{step, icon (null: a line), bad, isAfter: beside the end of the part}], badge, how}.
 */
function drawing(run) {
  const starts = known(run.starts ?? []);
  const left = (run.rollbacks ?? []).map((each) => ({ ...each, step: finite(each.step), to: finite(each.to) }));
  const last = Math.max(1, finite(run.step), ...starts.map((each) => each.step), ...left.map((each) => each.step));
  const rows = [];
  starts.forEach((start, i) => {
    rows.push(startRow(start, i, starts, run.created));
    while (left.length && within(left[0], start, starts[i + 1])) rows.push(rollbackRow(left.shift()));
  });
  rows.push(...left.map(rollbackRow));
  return { last, ticks: ticks(last), rows };
}

const within = (rollback, start, next) =>
  rollback.segment === undefined ? rollback.step <= start.step || !next : rollback.segment === start.number;

function ticks(last) {
  const rough = last / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, power * [1, 2, 5, 10].find((digit) => digit * power >= rough));
  const found = [];
  for (let at = 0; at <= last && found.length < 20; at += step) found.push(at);
  return found;
}

function startRow(start, i, starts, created) {
  const from = start.from_step ?? 0;
  const to = start.step ?? from;
  const bad = BAD.has(start.status);
  const signs = [];
  if (i) signs.push({ step: from, icon: null });
  if (start.badge === "diverged" && start.diverged_at !== null) signs.push({ step: start.diverged_at, icon: "diverged", bad: true });
  const parts = startParts(start, from, to, starts.slice(0, i), starts.slice(i + 1));
  signs.push({ step: to, icon: start.status, bad, isAfter: parts.some((part) => part.kind === "lost") });
  return {
    title: `Start ${start.number}`,
    words: [start.status, ` at ${start.status === "running" ? "step " : ""}${number(to)}${i ? `, from ${number(from)}` : ""}`],
    bad,
    when: start.last && start.status !== "running" ? `${clock(start.started, created)} – ${clock(start.last, start.started)} · ${duration(start.last - start.started)}` : clock(start.started, created),
    why: start.reason,
    parts,
    signs,
    badge: start.badge === "first" ? null : { kind: start.badge, words: badgeWords(start) },
    how: reason(start),
  };
}

/** The report of a resume without what its badge says. */
const reason = (start) => (start.how ?? "").replace(/^resume (verified|not verified|has nothing to verify): /, "");

/** Steps that were executed again, steps that count, and steps that a later start has replaced. */
function startParts(start, from, to, earlier, later) {
  const again = Math.min(to, Math.max(0, ...earlier.map((each) => each.step ?? 0)));
  const stays = Math.min(to, ...later.map((each) => each.from_step ?? Infinity));
  const begin = Math.max(again, from);
  const lost = Math.max(stays, begin);
  const state = { diverged: "diverged", verified: "verified" }[start.badge] ?? "unknown";
  const parts = [
    { kind: "bar", from: begin, to: stays, words: `steps ${begin} to ${stays}` },
    { kind: "lost", from: lost, to, words: `steps ${stays} to ${to}: superseded by a later start` },
    // Last, above the bar: what is a few pixels wide is drawn wider, to be seen.
    { kind: "again", state, from, to: again, words: `steps ${from} to ${again}: executed again` },
  ];
  return parts.filter((part) => part.to > part.from);
}

const rollbackRow = (one) => ({
  title: "Rolled back",
  words: ["", `${number(one.step)} → ${number(one.to)}`],
  when: "",
  parts: [{ kind: "rollback", from: one.to, to: one.step }],
  signs: [{ step: one.to, icon: "rolled back" }, { step: one.step, icon: null }],
  badge: null,
  how: one.reason ?? "",
});

// ------------------------------------------------------------------------------------ as elements

export function drawTimeline(parent, run) {
  const { last, ticks, rows } = drawing(run);
  parent.classList.add("timeline");
  parent.setAttribute("role", "list");
  parent.replaceChildren(axisRow(ticks, last), ...rows.map((row) => element(row, last)), legend(rows));
}

const LEGEND = [["bar", "steps that count"], ["again", "executed again"], ["lost", "superseded by a later start"], ["rollback", "rolled back"]];

/** What the bars and signs of these rows mean. */
function legend(rows) {
  const parts = rows.flatMap((row) => row.parts);
  const signs = [...new Set(rows.flatMap((row) => row.signs.map((sign) => sign.icon)))];
  const bars = LEGEND.map(([kind, words]) => [parts.find((part) => part.kind === kind), words]).filter(([part]) => part);
  const told = bars.map(([part, words]) => made("span", "", made("span", "timeline-sample", bar(part)), words));
  if (signs.includes(null)) told.push(made("span", "", made("span", "timeline-from"), "resumed (a dot in charts)"));
  for (const sign of signs.filter((one) => one && one !== "rolled back")) told.push(made("span", isBad(sign) ? "timeline-bad" : "", icon(sign), sign));
  const one = made("div", "timeline-legend", told);
  one.setAttribute("aria-hidden", "true"); // the rows say it in words
  return one;
}

const bar = (part) => made("span", part.kind === "again" ? `timeline-again timeline-again-${part.state}` : `timeline-${part.kind}`);

function placed(one, from, to, last) {
  one.style.left = `${(100 * from) / last}%`;
  if (to !== null) one.style.width = `${(100 * (to - from)) / last}%`;
  return one;
}

function axisRow(ticks, last) {
  const track = made("div", "timeline-track", ticks.map((step) => placed(made("span", "timeline-tick", number(step)), step, null, last)));
  const row = made("div", "timeline-row timeline-axis", made("div", "timeline-label", "step"), track, made("div", "timeline-badge"));
  row.setAttribute("aria-hidden", "true");
  return row;
}

function element(row, last) {
  const track = made("div", "timeline-track");
  for (const part of row.parts) {
    track.append(placed(Object.assign(bar(part), { title: part.words ?? "" }), part.from, part.to, last));
  }
  for (const sign of row.signs) {
    const shape = sign.icon ? icon(sign.icon) : made("span", "timeline-from");
    track.append(placed(made("span", `timeline-mark ${sign.bad ? "timeline-bad" : ""} ${sign.isAfter ? "timeline-after" : ""}`, shape), sign.step, null, last));
  }
  const one = made("div", "timeline-row", label(row), track, badgeBox(row));
  one.setAttribute("role", "listitem");
  return one;
}

function label(row) {
  const end = made("span", "timeline-end", made("span", row.bad ? "timeline-bad" : "", row.words[0]), row.words[1]);
  const when = row.when ? made("span", "timeline-when", row.when, row.why ? ` · ${row.why}` : null) : null;
  return Object.assign(made("div", "timeline-label", made("span", "timeline-start", row.title), " ", end, when), { title: row.why ?? "" });
}

/** The badge of a start's resume. */
export const badge = (start) => badgeElement(start.badge, badgeWords(start));

const badgeElement = (kind, words) => made("span", `badge badge-${kind.replaceAll(" ", "-")}`, icon(kind), words);

const badgeBox = (row) =>
  made("div", "timeline-badge", row.badge ? badgeElement(row.badge.kind, row.badge.words) : null, row.how ? made("span", "timeline-how", row.how) : null);

// ------------------------------------------------------------------------------------ as a picture

const COLUMNS = { label: 230, track: 560, badge: 180 };
const ROW = 34;

/** The timeline as a PNG, with the name of the run above. */
export function timelinePng(run) {
  const { last, ticks, rows } = drawing(run);
  const look = ink();
  const height = 64 + ROW * (rows.length + 1);
  const ratio = Math.min(2, 32_000 / height); // sharp on any screen, and not higher than browsers draw
  const canvas = document.createElement("canvas");
  canvas.width = ratio * (COLUMNS.label + COLUMNS.track + COLUMNS.badge);
  canvas.height = ratio * height;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = look.back;
  context.fillRect(0, 0, canvas.width, canvas.height);
  const write = (words, x, y, bold = false, kind = look.text) => {
    context.fillStyle = kind;
    context.font = `${bold ? 600 : 400} 12px ${FONT}`;
    context.fillText(plain(words), x, y);
  };
  const at = (step) => COLUMNS.label + ((COLUMNS.track - 24) * step) / last;
  write(run.name, 14, 24, true, look.strong);
  write("step", at(0) - 40, 50);
  for (const step of ticks) write(number(step), at(step) - context.measureText(number(step)).width / 2, 50);
  rows.forEach((row, i) => {
    const y = 64 + ROW * i + 14;
    write(row.title, 14, y + 4, true, look.strong);
    write(row.words.join(""), 90, y + 4, false, row.bad ? look.bad : look.text);
    context.fillStyle = look.line;
    context.fillRect(at(0), y - 0.5, at(last) - at(0), 1);
    for (const part of row.parts) drawPart(context, part, at(part.from), at(part.to), y, look);
    for (const sign of row.signs) {
      context.fillStyle = context.strokeStyle = sign.bad ? look.bad : look.strong;
      if (sign.icon) drawIcon(context, sign.icon, at(sign.step), y - (sign.isAfter ? 10 : 0), look.back);
      else context.fillRect(at(sign.step) - 1, y - 8, 2, 16);
    }
    if (row.badge) write(row.badge.words, COLUMNS.label + COLUMNS.track + 8, y + 4, true, badgeColour(row.badge.kind, look));
  });
  let left = 14;
  for (const [kind, words] of LEGEND) {
    const part = rows.flatMap((row) => row.parts).find((one) => one.kind === kind);
    if (!part) continue;
    const y = 64 + ROW * rows.length + 14;
    drawPart(context, part, left, left + 24, y, look);
    write(words, left + 30, y + 4);
    left += 50 + context.measureText(words).width;
  }
  for (const sign of new Set(rows.flatMap((row) => row.signs.map((one) => one.icon)))) {
    const y = 64 + ROW * rows.length + 14;
    context.fillStyle = context.strokeStyle = isBad(sign) ? look.bad : look.strong;
    if (sign) drawIcon(context, sign, left + 7, y, look.back);
    else context.fillRect(left + 6, y - 8, 2, 16);
    write(sign ?? "resumed", left + 20, y + 4);
    left += 40 + context.measureText(sign ?? "resumed").width;
  }
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

const badgeColour = (kind, look) => ({ verified: colour(2), diverged: look.bad })[kind] ?? look.text;

/** A part of a row: steps that count full, those executed again in stripes, superseded ones between dashes. */
function drawPart(context, part, from, to, y, look) {
  context.save();
  context.strokeStyle = context.fillStyle = part.kind === "bar" ? colour(0) : part.kind === "again" ? badgeColour(part.state, look) : look.text;
  context.lineWidth = 1;
  if (part.kind === "bar") context.fillRect(from, y - 4, to - from, 8);
  context.beginPath();
  if (part.kind === "again") {
    context.rect(from, y - 4, Math.max(4, to - from), 8);
    context.clip();
    context.fillStyle = look.back;
    context.fillRect(from, y - 4, to - from, 8);
    for (let x = from - 8; x < to; x += 5) context.moveTo(x, y + 4), context.lineTo(x + 8, y - 4);
    context.rect(from, y - 4, Math.max(4, to - from), 8);
  } else if (part.kind !== "bar") {
    context.setLineDash([3, 2]);
    for (const line of part.kind === "lost" ? [-2.5, 2.5] : [0]) context.moveTo(from, y + line), context.lineTo(to, y + line);
  }
  context.stroke();
  context.restore();
}

function drawIcon(context, name, x, y, back) {
  const shape = new Path2D(ICONS[name] ?? ICONS.gone);
  context.save();
  context.translate(x - 7, y - 7);
  context.scale(14 / 16, 14 / 16);
  context.save();
  context.fillStyle = back;
  context.beginPath();
  context.arc(8, 8, 8, 0, 2 * Math.PI);
  context.fill();
  context.restore();
  context.lineWidth = 2.4;
  FILLED.has(name) ? context.fill(shape) : context.stroke(shape);
  context.restore();
}
