// The report: one page from disk.  Its data stand in the element `data`, as JSON; whatever a run says there becomes
// text of the page, never markup.  Nothing is fetched: the policy of the page forbids every connection.

import { enlarge, made, save } from "./dom.js";
import { histogram } from "./histogram.js";
import { icon } from "./icons.js";
import { drawTimeline, timelinePicture } from "./timeline.js";
import { sha256 } from "./sha256.js";
import { changed, checkpoints, failures, runName, runsTable, section, sideBySide } from "./report_tables.js";
import { Charts, button } from "./report_charts.js";
import { clock, count, format } from "./words.js";

const source = document.getElementById("data");

function verified(text) {
  const expected = document.documentElement.dataset.sha256;
  const found = sha256(new TextEncoder().encode(text));
  const is = found === expected;
  const told = is
    ? "the data are as they were when the report was made; this browser has computed their SHA-256: "
    : `the data were changed after the report was made. They should have the SHA-256 ${expected} and have `;
  const box = made("p", is ? "verified" : "verified wrong", icon(is ? "verified" : "diverged"), told, made("code", "", found));
  box.id = "verified";
  box.setAttribute("role", is ? "status" : "alert");
  return box;
}

function timelines({ runs }) {
  const each = runs.map((run, at) => {
    const box = made("div");
    drawTimeline(box, run);
    const saved = button("Save the timeline as PNG", async () => save(`${run.name} timeline`, "png", await timelinePicture(run)));
    return made("div", "card", runs.length > 1 ? made("h3", "", runName(runs, at)) : null, box, made("div", "chart-buttons", saved));
  });
  return section("timeline", "Timeline", each);
}

// ---------------------------------------------------------------------------- summaries and logs

function summaries({ runs, summaries, summaries_left_out: left }) {
  if (!summaries.length) return null;
  const told = left ? made("p", "soft", `${count(left, "step")} of these ${left === 1 ? "is" : "are"} not in this file: they would make it too large.`) : null;
  return section("summaries", "Images and text", told, made("div", "charts", summaries.map((one) => summary(runs, one))));
}

/** The steps of one summary, the newest first seen. */
function summary(runs, { run, name, kind, shown }) {
  const place = made("div");
  const reading = made("span", "chart-reading");
  const draw = (at) => {
    const { step, content } = shown[at];
    reading.textContent = `step ${format(step)}`;
    place.replaceChildren(kind === "image" ? image(`${name} at step ${step}`, content) : kind === "histogram" ? histogram(content) : made("pre", "", content));
  };
  const last = shown.length - 1;
  const steps = Object.assign(document.createElement("input"), { type: "range", min: 0, max: last, value: last });
  steps.setAttribute("aria-label", `Step of ${name}`);
  steps.addEventListener("input", () => draw(Number(steps.value)));
  draw(last);
  const whose = runs.length > 1 ? made("p", "soft", runName(runs, run)) : null;
  return made("div", "card", made("div", "chart-head", made("span", "chart-title", made("bdi", "", name)), reading), whose, place, last ? steps : null);
}

const image = (alt, src) => Object.assign(made("img", "summary"), { alt, src, onload: enlarge });

function logs({ runs, logs }) {
  if (!logs.length) return null;
  const each = logs.map(({ run, text, is_cut: isCut }) => {
    const lines = count(text.split("\n").length - 1, "line");
    const box = made("pre", "log", text);
    box.tabIndex = 0;
    const title = made("summary", "", runs.length > 1 ? runName(runs, run) : null, ` ${isCut ? "the last " : ""}${lines}`);
    const folded = made("details", "", title, box);
    folded.open = runs.length === 1;
    return folded;
  });
  return section("log", "Log", each);
}

// ---------------------------------------------------------------------------------- the page

function about({ values, points, runs }) {
  const how =
    `${count(values, "value")} of ${count(runs.length, "run")}. A line has at most ${count(points, "point")}; a point that stands ` +
    "for several values carries their least, their greatest and their last.";
  const saved = button("save the data as JSON", () => save("report", "json", new Blob([source.textContent], { type: "application/json" })));
  const read = made("p", "", "A time on this page is that of this browser's clock. The data are JSON, in the element ", made("code", "", "data"), " of this file. ");
  return section("about", "About this file", made("p", "", how), read, saved);
}

function draw(data) {
  const { runs } = data;
  const charts = new Charts(data);
  const forks = runs.map((run, at) => (run.config_changed.length ? changed(runs, at) : null));
  return [
    runsTable(data, (at, on) => charts.show(at, on)),
    timelines(data),
    charts.section(),
    summaries(data),
    failures(runs),
    sideBySide("config", "Config", data.settings, runs),
    ...forks,
    sideBySide("environment", "Environment", data.facts, runs),
    checkpoints(runs),
    logs(data),
    about(data),
  ].filter(Boolean);
}

function open() {
  const page = document.querySelector("main");
  const time = document.querySelector("time");
  time.textContent = clock(Date.parse(time.dateTime) / 1000);
  page.append(verified(source.textContent));
  page.append(...draw(JSON.parse(source.textContent)));
}

open();
