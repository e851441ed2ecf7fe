// Axes of charts: their ranges, their ticks, and the words of these.

import { FONT, ink } from "./looks.js";
import { duration } from "./words.js";

// Numbers of 64 bits have 16 digits: in a range of fewer parts, value + step is value, and loops over ticks stand still.
export const ALIKE = 1e-9;
export const LARGEST = 1e300; // a range's ends can still be subtracted

export const areAlike = (low, high) => !(high - low > ALIKE * Math.max(Math.abs(low), Math.abs(high)));
export const between = (least, value, most) => Math.min(most, Math.max(least, value));

export function yRange(found, logY) {
  if (!found) return logY ? [0.1, 10] : [0, 1];
  const [low, high] = found.map((value) => between(-LARGEST, value, LARGEST));
  const alike = areAlike(low, high);
  if (logY) {
    const [first, last] = [low, high].map(Math.log10);
    const pad = alike ? Math.log10(2) : (last - first) * 0.05;
    return [first - pad, last + pad].map((power) => between(1 / LARGEST, 10 ** power, LARGEST));
  }
  const pad = alike ? Math.max(Math.abs(low), Math.abs(high)) * 0.1 || 1 : (high - low) * 0.06;
  return [low >= 0 && low < pad ? 0 : low - pad, high + pad];
}

const MOST_SPLITS = 9;

function logSplits(low, high) {
  if (!(low > 0 && high < Infinity)) return [];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const digit of [1, 2, 5]) {
      const value = Number(`${digit}e${power}`);
      if (value >= low * 0.999999 && value <= high * 1.000001) found.push(value);
    }
  }
  if (found.length < 2) return niceSplits(low, high, 5);
  if (found.length <= MOST_SPLITS) return found;
  const powers = found.filter((value) => /^1(\.0+)?e/.test(value.toExponential()));
  const every = Math.ceil(powers.length / MOST_SPLITS);
  return powers.filter((_, i) => i % every === 0);
}

function niceSplits(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((digit) => digit * power >= rough);
  const first = Math.ceil(low / step);
  const all = Array.from({ length: wanted + 2 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
  return all.filter((value) => value <= high + step * 1e-9);
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const timeSteps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, ...TIME_STEPS, ...[2, 5, 10, 20, 50, 100].map((d) => d * 86400)];

/** Ticks of one axis: in one unit, and with as many decimals as the finest needs. */
function ticks(values) {
  const sizes = values.map((value) => Math.abs(value ?? 0));
  if (sizes.some((size) => size >= 1e12 || (size > 0 && size < 1e-4))) return values.map((value) => (value === null ? "" : tick(value)));
  const largest = Math.max(...sizes);
  const [unit, letter] = [[1e9, "G"], [1e6, "M"], [1e4, "k"]].find(([least]) => largest >= least) ?? [1, ""];
  const parts = values.map((value) => Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(6)));
  const decimals = Math.min(6, Math.max(...parts.map((part) => (String(part).split(".")[1] ?? "").length)));
  return parts.map((part, i) => (values[i] === null ? "" : part === 0 ? "0" : `${part.toFixed(decimals)}${letter}`.replace("-", "−")));
}

function tick(value) {
  const size = Math.abs(value);
  if (size >= 1e12 || (size > 0 && size < 1e-4)) return value.toExponential().replace("-", "−").replace("e−", "e-").replace("e+", "e");
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit && (unit > 1e3 || size >= 1e4)) return `${Number((value / unit).toPrecision(6))}${letter}`.replace("-", "−");
  }
  return String(Number(value.toPrecision(10))).replace("-", "−");
}

export function axis(side, log, kind) {
  const look = ink();
  const own = {
    stroke: look.text,
    font: `11px ${FONT}`,
    grid: { stroke: look.line, width: 1, show: side === 3 },
    ticks: { stroke: look.line, width: 1, size: 4, show: side === 2 },
    border: { show: side === 2, stroke: look.line, width: 1 },
    gap: 4,
    values: (u, splits) => (kind === "time" || log ? splits.map((value) => (value === null ? "" : kind === "time" ? duration(value) : tick(value))) : ticks(splits)),
  };
  if (side === 2) Object.assign(own, { size: 26, space: 56 });
  else Object.assign(own, { space: 26, size: (u, values) => 14 + 6.2 * Math.max(3, ...(values ?? []).map((v) => v.length)) });
  if (kind === "time" && !log) own.incrs = timeSteps;
  if (kind === "step" && !log) own.incrs = Array.from({ length: 33 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));
  if (log) {
    own.splits = (u, at, low, high) => logSplits(low, high);
    own.filter = (u, splits) => splits;
  }
  return own;
}
