// A histogram of `add_summary` as a drawing: its buckets as bars, above the ends of its range.

import { drawn, made } from "./dom.js";
import { count, format } from "./words.js";

const [WIDTH, HEIGHT] = [640, 160];

/** `text`: JSON {min, max, num, bucket_limit, bucket}, as the journal has it; what is not a histogram is shown as text. */
export function histogram(text) {
  const { limits, counts, num } = parsed(text);
  if (!counts) return made("pre", "summary", text);
  const width = limits.length > 1 ? limits[1] - limits[0] : 1;
  const most = Math.max(1, ...counts);
  const bars = counts.map((value, i) => {
    const height = Math.max(value > 0 ? 1.5 : 0, (HEIGHT * value) / most);
    const words = `${format(limits[i] - width)} to ${format(limits[i])}: ${format(value)}`;
    const place = { x: (WIDTH * i) / counts.length, width: WIDTH / counts.length - 1, y: HEIGHT - height, height };
    return drawn("rect", place, drawn("title", {}, words));
  });
  const ends = [limits[0] - width, limits.at(-1)].map((end) => made("span", "", format(end)));
  const drawing = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `Histogram of ${count(num, "value")}` }, ...bars);
  return made("div", "histogram", drawing, made("div", "histogram-ends", ends[0], made("span", "", count(num, "value")), ends[1]));
}

function parsed(text) {
  try {
    const { bucket, bucket_limit: limits, num } = JSON.parse(text);
    const good = [bucket, limits].every((list) => Array.isArray(list) && list.length === bucket.length && list.every(Number.isFinite));
    return good && bucket.length && Number.isFinite(num) ? { counts: bucket, limits, num } : {};
  } catch {
    return {}; // text, or cut off
  }
}
