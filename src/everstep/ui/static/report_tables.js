// Tables of the report: the runs, what they were given side by side, their checkpoints and failures.

import { swatch } from "./looks.js";
import { made, showGoingOn } from "./dom.js";
import { icon } from "./icons.js";
import { badge } from "./timeline.js";
import { bytes, clock, count, format, recorded, words } from "./words.js";

export function section(id, title, ...children) {
  return Object.assign(made("section", "", made("h2", "", title), ...children), { id });
}

export function scrolled(table) {
  const box = made("div", "scrolled", table);
  showGoingOn(box);
  return box;
}

export function checkbox(words, checked, change) {
  const input = Object.assign(document.createElement("input"), { type: "checkbox", checked });
  input.addEventListener("change", () => change(input.checked));
  return made("label", "choice", input, words);
}

/** A name of a run or a metric: its direction of writing stays its own. */
const name = (text) => made("bdi", "", String(text));

/** The name of a run with the colour and the dash of its lines. */
export const runName = (runs, at) => made("span", "run-name", swatch(at), name(runs[at].name));

const cells = (tag, values, numbers = []) => values.map((value, i) => made(tag, numbers.includes(i) ? "number" : "", value));

const table = (head, rows, kind = "") => scrolled(made("table", kind, head && made("thead", "", made("tr", "", head)), made("tbody", "", rows)));

// ----------------------------------------------------------------------------------------- the runs

/** The table of runs; `show(at, on)` is called when a run is chosen or left out. */
export function runsTable({ runs, metrics }, show) {
  const head = ["run", "status", "steps", "starts", "resumes", ...metrics.map((one) => one.name)].map(name);
  const numbers = [2, 3, ...metrics.map((_, i) => 5 + i)];
  const rows = runs.map((run, at) => {
    const labels = [...run.tags.map((tag) => made("span", "tag", name(tag))), run.note ? made("p", "note", run.note) : null];
    const first = made("td", "", runs.length > 1 ? visibility(run, at, show) : null, runName(runs, at), labels);
    const status = made("td", `status-${run.status}`, icon(run.status), run.status);
    const values = metrics.map((one) => Object.assign(made("td", "number", format(one.values[at])), { title: words(one.values[at] ?? undefined) }));
    return made("tr", "", first, status, cells("td", [format(run.steps), format(run.starts.length)], [0, 1]), resumes(run), values);
  });
  return section("runs", "Runs", table(cells("th", head, numbers), rows));
}

function visibility(run, at, show) {
  const box = checkbox("", true, (on) => show(at, on));
  box.firstChild.setAttribute("aria-label", `show ${run.name} in the charts`);
  return box;
}

/** The badges of a run's resumes, each kind once, with its number. */
function resumes(run) {
  const kinds = new Map();
  for (const start of run.starts.filter((one) => one.badge !== "first")) {
    const kind = start.badge === "diverged" ? `diverged ${start.diverged_at}` : start.badge;
    kinds.set(kind, [...(kinds.get(kind) ?? []), start]);
  }
  const found = [...kinds.values()].map((starts) => {
    const box = badge(starts[0]);
    if (starts.length > 1) box.append(` × ${starts.length}`);
    return box;
  });
  return made("td", "badges", found.length ? found : "none");
}

// ------------------------------------------------------------------------------------- side by side

/** Settings or facts: {name, values} for each, with differences marked. */
export function sideBySide(id, title, rows, runs) {
  if (!rows.length) return section(id, title, made("p", "soft", "Nothing was recorded."));
  const judged = rows.map((row) => ({ ...row, texts: row.values.map((value) => recorded(row.name, value)) }));
  const isOther = (row) => row.texts.some((text) => text !== row.texts[0]);
  const body = judged.map((row) =>
    made("tr", runs.length > 1 && isOther(row) ? "differs" : "same", made("th", "path", name(row.name)), row.texts.map((text) => made("td", "value", text))),
  );
  const box = table([made("th", "", ""), runs.map((_, at) => made("th", "", runName(runs, at)))].flat(), body, "side");
  return section(id, title, runs.length > 1 ? differences(judged.filter(isOther).length, box.firstChild) : null, box);
}

function differences(differ, table) {
  const told = differ ? `${count(differ, "difference")}, marked with ≠` : "no difference between the runs";
  const only = checkbox("differences only", differ > 0, (on) => table.classList.toggle("only", on));
  table.classList.toggle("only", differ > 0);
  return made("div", "controls", told, differ ? only : null);
}

/** The settings of a fork that are not those of the run from which it was forked. */
export function changed(runs, at) {
  const run = runs[at];
  const rows = run.config_changed.map((one) => {
    const values = [one.parent, one.here].map((value) => made("td", "value", words(value ?? undefined)));
    return made("tr", "differs", made("th", "path", name(one.name)), values);
  });
  const head = cells("th", ["", name(run.parent), runName(runs, at)]);
  return made("div", "changed", made("h3", "", "Changed from the run that it was forked from"), table(head, rows, "side"));
}

// ------------------------------------------------------------------------------ failures, checkpoints

export function failures(runs) {
  const found = runs.flatMap((run, at) => run.failures.map((one) => [at, one]));
  if (!found.length) return null;
  const rows = found.map(([at, one]) => {
    const where = `step ${format(one.step)}${one.rank ? `, rank ${one.rank}` : ""}`;
    const more = made("details", "", made("summary", "", one.what), made("pre", "", one.lines.join("\n")));
    return made("tr", "", cells("td", [runName(runs, at), one.kind, where, clock(one.time), more]));
  });
  return section("failures", "Failures", table(null, rows));
}

export function checkpoints(runs) {
  const several = runs.length > 1 ? 1 : 0;
  const rows = runs.flatMap((run, at) =>
    run.checkpoints.map((one) => {
      const signs = [one.pinned ? "pinned" : null, one.best ? `best ${one.best}` : null].filter(Boolean).join(", ");
      const state = one.whole ? made("td", "", "whole") : made("td", "damaged", icon("failed"), `damaged: ${one.problem}`);
      const numbers = cells("td", [format(one.step), bytes(one.bytes)], [0, 1]);
      return made("tr", "", several ? made("td", "", runName(runs, at)) : null, made("td", "", name(one.name)), state, numbers, made("td", "", signs));
    }),
  );
  if (!rows.length) return section("checkpoints", "Checkpoints", made("p", "soft", "No checkpoint is there."));
  const head = [...(several ? ["run"] : []), "checkpoint", "state", "step", "size", "kept because"];
  return section("checkpoints", "Checkpoints", table(cells("th", head, [2 + several, 3 + several]), rows));
}
