// Charts of the report: all in one look, with the runs that the reader chose.

import { lineChart } from "./charts.js";
import { made, save } from "./dom.js";
import { marks } from "./timeline.js";
import { checkbox, section } from "./report_tables.js";
import { phases } from "./words.js";

const MANY = 8; // charts: with more there is a field to find one

export function button(words, click) {
  const one = Object.assign(made("button", "", words), { type: "button" });
  one.addEventListener("click", click);
  return one;
}

export class Charts {
  constructor({ runs, charts }) {
    this.runs = runs;
    this.hidden = new Set();
    this.options = { smooth: 0, logY: false, superseded: false, x: "step", from: null, to: null };
    this.each = charts.map((chart) => ({ chart, box: made("div", "card"), drawn: null }));
  }

  /** Show a run in all charts, or leave it out. */
  show(at, on) {
    on ? this.hidden.delete(at) : this.hidden.add(at);
    this.refresh();
  }

  section() {
    if (!this.each.length) return section("charts", "Charts", made("p", "soft", "No metric was recorded."));
    const lazily = new IntersectionObserver((seen) => seen.forEach((one) => one.isIntersecting && one.target.make?.()), {
      rootMargin: "600px",
    });
    for (const one of this.each) {
      one.box.make = () => this.make(one);
      lazily.observe(one.box);
    }
    addEventListener("beforeprint", () => this.each.forEach((one) => one.box.make?.()));
    const told = made("p", "soft", phases(this.each.map(({ chart }) => chart.title)));
    return section("charts", "Charts", this.controls(), told, made("div", "charts", this.each.map((one) => one.box)));
  }

  controls() {
    const smooth = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
    smooth.addEventListener("input", () => this.refresh({ smooth: Number(smooth.value) }));
    const bar = made("div", "controls", made("label", "choice", "smoothing", smooth), this.axis());
    bar.append(checkbox("log y", false, (logY) => this.refresh({ logY })));
    const old = this.each.some(({ chart }) => chart.series.some((line) => line.superseded.length));
    if (old) bar.append((this.old = checkbox("superseded points", false, (superseded) => this.refresh({ superseded }))));
    if (this.each.length > MANY) bar.append(this.filter());
    return bar;
  }

  axis() {
    const choose = (x) => {
      this.refresh({ x, from: null, to: null });
      each.forEach((one) => one.setAttribute("aria-pressed", String(one.textContent.toLowerCase().startsWith(x))));
    };
    const each = ["Steps", "Time"].map((words) => button(words, () => choose(words === "Time" ? "time" : "step")));
    each[0].setAttribute("aria-pressed", "true");
    const box = made("span", "switch", each);
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "x axis");
    return box;
  }

  filter() {
    const input = Object.assign(document.createElement("input"), { type: "search", placeholder: "part of a metric's name" });
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase();
      for (const one of this.each) one.box.hidden = !one.chart.title.toLowerCase().includes(wanted);
    });
    return made("label", "choice", "show", input);
  }

  make(one) {
    one.box.make = null;
    const parent = made("div");
    const saved = ["png", "csv"].map((kind) => button(kind.toUpperCase(), async () => save(one.chart.title, kind, await one.drawn[kind]())));
    one.box.append(parent, made("div", "chart-buttons", this.hasOnlyOld(one.chart) ? button("Show superseded points", () => this.old.click()) : null, saved));
    const onZoom = (from, to) => this.refresh({ from, to }, one);
    one.drawn = lineChart(parent, this.lines(one.chart), { ...this.options, height: 220, onZoom });
  }

  hasOnlyOld = (chart) => chart.series.every((line) => !line.n) && chart.series.some((line) => line.superseded.length);

  /** The data of a chart: the lines of the runs that are shown, and the marks of a run that is alone. */
  lines(chart) {
    const { x } = this.options;
    const series = chart.series
      .filter((line) => !this.hidden.has(line.run))
      .map((line) => ({ ...(x === "time" ? overTime(line) : line), slot: line.run, label: this.runs[line.run].name }));
    const alone = series.length === 1 ? this.runs[series[0].run] : null;
    return { title: chart.title, x, series, marks: alone ? marks(alone, x) : [] };
  }

  refresh(options = {}, except = null) {
    Object.assign(this.options, options);
    for (const one of this.each) if (one !== except) one.drawn?.update(this.lines(one.chart), this.options);
  }
}

/** A line over seconds since its run began: the data have both axes. */
function overTime(line) {
  const timed = (points) => points.map(([, value, time]) => [time, value]);
  return { ...line, x: line.times, superseded: timed(line.superseded), nonfinite: timed(line.nonfinite) };
}
