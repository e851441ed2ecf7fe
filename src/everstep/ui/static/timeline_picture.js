// The picture of a timeline: what timeline.js draws with elements, on a canvas.

import { ICONS, FILLED } from "./icons.js";
import { FONT } from "./looks.js";
import { format } from "./words.js";

const [WIDTH, LEFT, TRACK, RIGHT] = [1080, 16, 256, 780]; // pixels: where label, track and badge begin
const TRACK_WIDTH = RIGHT - 28 - TRACK;
const LINE = 16;
const BADGES = { verified: "good", "not verified": "warn", diverged: "bad" };

/** A PNG of `drawing`: {last, ticks, rows}, as timeline.js describes. */
export function picture(name, { last, ticks, rows }) {
  const canvas = document.createElement("canvas");
  const pen = canvas.getContext("2d");
  const ratio = Math.max(2, devicePixelRatio); // a picture is looked at larger than the page
  const drawn = rows.map((row) => ({ ...row, left: labels(pen, row), right: lines(pen, row.how, WIDTH - RIGHT - LEFT, 6) }));
  const height = (row) => 18 + LINE * Math.max(1 + row.left.length, row.right.length + (row.badge ? 1.4 : 0));
  canvas.width = WIDTH * ratio;
  canvas.height = (64 + drawn.reduce((sum, row) => sum + height(row), 0) + 8) * ratio;
  pen.scale(ratio, ratio);
  pen.fillStyle = ink("back");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  text(pen, name, LEFT, 24, "text", `600 15px ${FONT}`);
  pen.textAlign = "center";
  for (const step of ticks) text(pen, format(step), at(step, last), 52, "soft", `11px ${FONT}`);
  pen.textAlign = "right";
  text(pen, "step", TRACK - 16, 52, "soft", `11px ${FONT}`);
  pen.textAlign = "left";
  let top = 62;
  for (const row of drawn) {
    drawRow(pen, row, top, height(row), last);
    top += height(row);
  }
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const at = (step, last) => TRACK + (TRACK_WIDTH * step) / last;

function text(pen, words, x, y, colour, font = `12px ${FONT}`) {
  pen.fillStyle = ink(colour);
  pen.font = font;
  pen.fillText(words, x, y);
}

const labels = (pen, row) => lines(pen, [row.when, row.why].filter(Boolean).join(" · "), TRACK - LEFT - 24, 4);

/** Words in lines of a width in pixels, at most `most`. */
function lines(pen, words, width, most) {
  pen.font = `12px ${FONT}`;
  const found = [];
  let line = "";
  for (const word of words.split(/\s+/).filter(Boolean)) {
    const longer = line ? `${line} ${word}` : word;
    if (line && pen.measureText(longer).width > width) found.push(line), (line = word);
    else line = longer;
  }
  if (line) found.push(line);
  if (found.length > most) found.splice(most - 1, Infinity, `${found[most - 1]} …`);
  return found;
}

function drawRow(pen, row, top, height, last) {
  pen.fillStyle = ink("line");
  pen.fillRect(LEFT, top, WIDTH - 2 * LEFT, 1);
  const first = top + 8 + LINE - 3;
  text(pen, row.title, LEFT, first, "text", `600 13px ${FONT}`);
  let x = LEFT + pen.measureText(`${row.title} `).width;
  text(pen, row.words[0], x, first, row.bad ? "bad" : "text", `13px ${FONT}`);
  x += pen.measureText(row.words[0]).width;
  text(pen, row.words[1], x, first, "text", `13px ${FONT}`);
  row.left.forEach((line, i) => text(pen, line, LEFT, first + LINE * (i + 1), "soft"));
  if (row.badge) drawBadge(pen, row.badge, top + 8);
  row.right.forEach((line, i) => text(pen, line, RIGHT, first + LINE * (i + (row.badge ? 1.4 : 0)), "soft"));
  const middle = top + height / 2;
  pen.fillStyle = ink("line");
  pen.fillRect(TRACK, middle, TRACK_WIDTH, 1);
  for (const part of row.parts) PARTS[part.kind](pen, at(part.from, last), at(part.to, last), middle, part);
  for (const sign of row.signs) drawSign(pen, sign, at(sign.step, last) + (sign.isAfter ? 17 : 0), middle);
}

const PARTS = {
  bar(pen, from, to, y) {
    pen.fillStyle = ink("accent");
    pen.fillRect(from, y - 4, to - from, 8);
  },
  again(pen, from, end, y, { state }) {
    const to = Math.max(end, from + 11);
    pen.save();
    pen.fillStyle = ink("back");
    pen.fillRect(from, y - 4, to - from, 8);
    pen.strokeStyle = ink({ verified: "good", diverged: "bad" }[state] ?? "soft");
    pen.lineWidth = 1;
    pen.strokeRect(from, y - 4, to - from, 8);
    pen.beginPath();
    pen.rect(from, y - 4, to - from, 8);
    pen.clip();
    pen.lineWidth = 1.8;
    pen.beginPath();
    for (let x = from - 8; x < to; x += 5) pen.moveTo(x, y - 4), pen.lineTo(x + 8, y + 4);
    pen.stroke();
    pen.restore();
  },
  lost: (pen, from, to, y) => dashed(pen, [[to + 9, y - 2.5], [from, y - 2.5], [from, y + 2.5], [to + 9, y + 2.5]], "text", 1, [3, 3]),
  rollback: (pen, from, to, y) => dashed(pen, [[from, y], [to, y]], "warn", 2, [2, 3]),
};

function dashed(pen, points, colour, width, dash) {
  pen.save();
  pen.strokeStyle = ink(colour);
  pen.lineWidth = width;
  pen.setLineDash(dash);
  pen.beginPath();
  for (const point of points) pen.lineTo(...point);
  pen.stroke();
  pen.restore();
}

function drawSign(pen, sign, x, y) {
  pen.fillStyle = ink(sign.icon ? "back" : "text");
  if (!sign.icon) return pen.fillRect(x - 1, y - 8, 2, 16);
  pen.beginPath();
  pen.arc(x, y, 8, 0, 2 * Math.PI);
  pen.fill();
  return drawIcon(pen, sign.icon, x, y, 14, ink(sign.bad ? "bad" : "text"));
}

function drawIcon(pen, name, x, y, size, colour) {
  const path = new Path2D(ICONS[name] ?? ICONS.gone);
  pen.save();
  pen.translate(x - size / 2, y - size / 2);
  pen.scale(size / 16, size / 16);
  Object.assign(pen, { strokeStyle: colour, fillStyle: colour, lineWidth: 2.2, lineCap: "round", lineJoin: "round" });
  if (FILLED.has(name)) pen.fill(path);
  pen.stroke(path);
  pen.restore();
}

function drawBadge(pen, badge, top) {
  const colour = BADGES[badge.kind] ?? "soft";
  pen.font = `550 12px ${FONT}`;
  const width = pen.measureText(badge.words).width + 34;
  pen.beginPath();
  pen.roundRect(RIGHT, top, width, 20, 10);
  if (BADGES[badge.kind]) (pen.fillStyle = ink(`${colour}-back`)), pen.fill();
  pen.strokeStyle = ink(colour);
  pen.lineWidth = badge.kind === "diverged" ? 2 : 1;
  pen.setLineDash(badge.kind === "not verified" ? [3, 3] : []);
  pen.stroke();
  pen.setLineDash([]);
  drawIcon(pen, badge.kind, RIGHT + 14, top + 10, 12, ink(colour));
  text(pen, badge.words, RIGHT + 25, top + 14.5, colour, `550 12px ${FONT}`);
}
