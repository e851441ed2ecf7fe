// Questions to the server; in a report, to the data that it carries.  An answer that is not good is an Error with the
// server's words.

import { useEffect, useState } from "./preact.js";
import { bests } from "./words.js";

const MOST_SETTINGS = 6; // in a report's list of runs
const MOST_BEST = 5;
const embedded = document.getElementById("data");

/** The data of a report; null in the page of a server. */
export const report = embedded && JSON.parse(embedded.textContent);

/** Ask; a parameter whose value is a list is given once for each of its elements. */
export async function get(path, params = {}, signal = undefined) {
  if (report) return carried(path, params);
  const each = Object.entries(params).flatMap(([name, value]) => [value].flat().map((one) => [name, one]));
  const given = each.filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  let answer;
  try {
    answer = await fetch(query ? `${path}?${query}` : path, { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer; start everstep ui again");
  }
  if (answer.status === 401) throw new Error("this browser has no session; open the link that everstep ui printed");
  const content = await answer.json().catch((error) => {
    if (error.name === "AbortError") throw error; // after the head of the answer: what was read of its body is no answer
    throw new Error(`the server's answer cannot be read (${answer.status})`);
  });
  if (!answer.ok) throw new Error(content.error ?? `the server answered ${answer.status}`);
  return content;
}

export const runPath = (id) => `/api/runs/${encodeURIComponent(id)}`;

/** Address of a summary for the browser, or its content in a report. */
export const summaryAddress = (id, { name, kind }, step) =>
  report ? report.summaries[id][`${kind} ${name} ${step}`] : `${runPath(id)}/summary?${new URLSearchParams({ name, kind, step })}`;

/** The text of a summary. */
export async function summaryText(id, one, step, signal) {
  const address = summaryAddress(id, one, step);
  if (report) return address;
  const answer = await fetch(address, { signal });
  const text = await answer.text();
  if (!answer.ok) throw new Error(JSON.parse(text).error);
  return text;
}

// ----------------------------------------------------------------------------------------- changes

const PAUSE = 500; // milliseconds between two questions

let tell = () => {};
let heard = "";

/** Be told {heard, problems}: whether the server answers, and what it cannot read. */
export function onHeard(told) {
  tell = told;
}

function note(found) {
  const text = JSON.stringify(found);
  if (text !== heard) tell(found);
  heard = text;
}

/**
 * What has changed, asked again and again while the page is seen: {version: grows when anything changes, sizes: {id: grows
 * with each new point of a run}}; null before the first answer.  What is fetched after that is newer.
 */
export function useChanges(runs = []) {
  const [found, setFound] = useState(report ? { version: 0, sizes: {} } : null);
  const ids = runs.join(",");
  useEffect(() => {
    if (report) return undefined;
    const stop = new AbortController();
    let timer = null;
    const ask = async () => {
      try {
        if (!document.hidden) {
          const { version, sizes, problems } = await get("/api/changes", { runs: ids }, stop.signal);
          note({ heard: true, problems });
          setFound((before) => (JSON.stringify(before) === JSON.stringify({ version, sizes }) ? before : { version, sizes }));
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        note({ heard: false, problems: [error.message] });
        setFound((before) => before ?? { version: 0, sizes: {} });
      }
      timer = setTimeout(ask, PAUSE);
    };
    ask();
    return () => (stop.abort(), clearTimeout(timer));
  }, [ids]);
  return found;
}

/**
 * An answer of the server, asked again when path, parameters or `version` change; an older answer stays until then.
 * Nothing is asked without a version.
 */
export function useAnswer(path, params, version) {
  const [state, setState] = useState({ answer: null, error: null });
  const key = `${path}?${JSON.stringify(params)}`;
  useEffect(() => {
    if (version === undefined || !path) return undefined;
    const stop = new AbortController();
    get(path, params, stop.signal)
      .then((answer) => setState({ answer, error: null }))
      .catch((error) => error.name !== "AbortError" && setState((before) => ({ ...before, error })));
    return () => stop.abort();
  }, [key, version]);
  return state;
}

// ----------------------------------------------------------------------------------------- a report

function carried(path, params) {
  const [, , where, id, part] = path.split("/");
  const ids = (params.runs ?? "").split(",");
  if (where === "series") {
    const lines = report.series[`${params.stream}/${params.metric}`].filter((line) => ids.includes(line.run));
    return { x: params.x, series: params.x === "time" ? lines.map(overTime) : lines };
  }
  if (id) return part === "log" ? report.logs[id] : report.runs[id];
  const best = [...new Set(report.runs.flatMap((run) => bests(run).map((one) => one.name)))].slice(0, MOST_BEST);
  const results = best.map((name) => ({ name: `best/${name}`, values: report.runs.map((run) => bests(run).find((one) => one.name === name)?.value) }));
  if (where === "compare") {
    const compared = (all) => all.map(({ name, values }) => ({ name, values: ids.map((id) => values[id]) }));
    return { runs: ids.map((id) => report.runs[id]), results: compared(results), settings: compared(report.settings), streams: report.streams };
  }
  const kinds = [["name", "text"], ["status", "status"], ["step", "number"], ["created", "time"], ["duration", "duration"], ...results.map(({ name }) => [name, "number"])];
  const settings = report.settings.slice(0, MOST_SETTINGS).map(({ name, values }) => [name, values.every((one) => one === null || typeof one === "number") ? "number" : "text"]);
  const values = (run, i) => ({ ...run, ...Object.fromEntries([...results, ...report.settings].map((row) => [row.name, row.values[i]])) });
  const rows = report.runs.map((run, i) => ({ ...run, values: values(run, i) }));
  const isNone = (value) => (value ?? null) === null || value === "NaN";
  const order = (a, b) => (typeof a === typeof b ? (a < b ? -1 : Number(a > b)) : String(a) < String(b) ? -1 : 1);
  const compared = ([a, b]) => (isNone(a) || isNone(b) ? isNone(a) - isNone(b) : (params.desc ? -1 : 1) * order(a, b));
  if (params.sort) rows.sort((...pair) => compared(pair.map((row) => row.values[params.sort])));
  return { total: rows.length, matched: rows.length, columns: [...kinds, ...settings].map(([name, kind]) => ({ name, kind })), rows };
}

/** A line over time: the data have both axes. */
function overTime(line) {
  const timed = (points) => (points ?? []).map(([, value, time]) => [time, value]);
  return { ...line, x: line.times, superseded: timed(line.superseded), nonfinite: timed(line.nonfinite) };
}
