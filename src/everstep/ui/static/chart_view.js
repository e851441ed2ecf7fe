// Charts of a run or of a comparison: how they look is in the address; what they show is fetched when it is seen.

import { html, useEffect, useMemo, useRef, useState } from "./preact.js";
import { get } from "./api.js";
import { lineChart } from "./charts.js";
import { setQuery } from "./route.js";
import { Empty, Problem, Saves, useSeen } from "./parts.js";
import { count, phases, titled } from "./words.js";

const SMOOTH = [0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99];

/** The look of all charts of a view, read from the query of the address. */
export function looks(query) {
  const number = (name) => (query[name] === undefined || !Number.isFinite(Number(query[name])) ? null : Number(query[name]));
  return {
    smooth: Math.min(0.99, Math.max(0, number("smooth") ?? 0)),
    logX: query.logx === "1",
    logY: query.logy === "1",
    x: query.x === "time" ? "time" : "step",
    superseded: query.superseded === "1",
    from: number("from"),
    to: number("to"),
  };
}

const flag = (value) => (value ? "1" : "");

export function ChartBar({ look, part }) {
  const at = SMOOTH.findIndex((value) => value >= look.smooth);
  const whole = () => setQuery({ from: "", to: "" });
  const otherX = () => setQuery({ x: look.x === "time" ? "" : "time", from: "", to: "" });
  const check = (words, on, change) => html`<label class="check"><input type="checkbox" checked=${on} onChange=${change} /> ${words}</label>`;
  return html`
    <div class="bar chart-bar">
      <input type="search" value=${part} onInput=${(e) => setQuery({ find: e.target.value })} placeholder="Find a chart" aria-label="Find a chart" spellcheck="false" />
      <label class="slide">Smoothing
        <input type="range" min="0" max=${SMOOTH.length - 1} value=${at} onInput=${(e) => setQuery({ smooth: SMOOTH[e.target.value] || "" })} />
        <output>${look.smooth || "off"}</output>
      </label>
      <span class="switch" role="group" aria-label="x axis">
        <button aria-pressed=${look.x === "step"} onClick=${() => look.x === "time" && otherX()}>Steps</button>
        <button aria-pressed=${look.x === "time"} onClick=${() => look.x === "step" && otherX()}>Time</button>
      </span>
      ${check("log y", look.logY, () => setQuery({ logy: flag(!look.logY) }))}
      ${check("log x", look.logX, () => setQuery({ logx: flag(!look.logX) }))}
      ${check(html`<span title="Values of steps that a later start executed again, as far as they had reached the journal">superseded points</span>`, look.superseded, () => setQuery({ superseded: flag(!look.superseded) }))}
      ${look.from !== null ? html`<button onClick=${whole}>Whole axis</button>` : null}
    </div>
  `;
}

/**
 * One chart.  `runs`: [{id, label, slot}]; `marks`: for charts.js; `changed`: {run id: number}, which grows with
 * each new point of a run; `pick`: called with the id of a run whose line is clicked.
 */
export function ChartCard({ runs, stream, metric, title, look, marks, changed, pick }) {
  const [box, seen] = useSeen();
  const [wide, setWide] = useState(false);
  const [state, setState] = useState({ found: null, error: null });
  const whole = useRef({ key: "", found: null });
  const place = useRef(null);
  const chart = useRef(null);
  const ids = runs.map((run) => run.id).join(",");
  const fresh = runs.reduce((sum, run) => sum + (changed[run.id] ?? 0), 0);

  useEffect(() => {
    if (!seen) return undefined;
    const stop = new AbortController();
    const params = { runs: ids, stream, metric, x: look.x, points: wide && runs.length < 10 ? 2000 : undefined, superseded: look.superseded ? 1 : 0 };
    const key = JSON.stringify(params);
    const isPart = look.from !== null || look.to !== null;
    const ask = async () => {
      // what is smoothed begins where the run begins
      if (!isPart || (look.smooth && whole.current.key !== key)) whole.current = { key, found: await get("/api/series", params, stop.signal) };
      const found = isPart ? await get("/api/series", { ...params, from: look.from, to: look.to }, stop.signal) : whole.current.found;
      setState({ found, error: null });
    };
    ask().catch((error) => error.name !== "AbortError" && setState((before) => ({ ...before, error })));
    return () => stop.abort();
  }, [seen, ids, look.x, look.from, look.to, look.superseded, Boolean(look.smooth), wide, fresh]);

  const data = useMemo(() => state.found && joined(title, state.found, runs, marks, whole.current.found), [state.found, title, ids, marks]);
  useEffect(() => {
    if (!data || data.x !== look.x) return;
    const onZoom = (from, to) => setQuery({ from: rounded(from, look.x), to: rounded(to, look.x) });
    const options = { ...look, height: wide ? 420 : 180, onZoom, pick: pick && ((at) => pick(data.series[at].id)) };
    if (chart.current) chart.current.update(data, options);
    else chart.current = lineChart(place.current, data, options);
  }, [data, look.smooth, look.logX, look.logY, look.superseded, look.from, look.to, look.x, wide]);
  useEffect(() => () => chart.current?.destroy(), []);
  useEffect(() => void (wide && box.current.scrollIntoView({ block: "nearest" })), [wide]);

  const onlyOld = data && data.series.length > 0 && data.series.every((one) => !one.n);
  const saved = { PNG: () => chart.current.png(), CSV: () => chart.current.csv() };
  return html`
    <section class=${`card ${wide ? "wide" : ""}`} ref=${box} aria-label=${title}>
      <div class="card-plot" ref=${place}></div>
      ${state.found || state.error ? null : html`<p class="card-wait soft">${title}</p>`}
      <${Problem} error=${state.error} />
      <div class="card-tools">
        ${onlyOld && !look.superseded ? html`<button onClick=${() => setQuery({ superseded: "1" })}>Show superseded points</button>` : null}
        <button onClick=${() => setWide(!wide)} aria-pressed=${wide}>${wide ? "Smaller" : "Larger"}</button>
        <${Saves} name=${title} file=${`${runs.length === 1 ? runs[0].label : count(runs.length, "run")} ${title}`} as=${saved} disabled=${!data} />
      </div>
    </section>
  `;
}

const rounded = (value, x) => (value === null ? "" : x === "step" ? Math.round(value) : Number(value.toPrecision(8)));

function joined(title, found, runs, marks, whole) {
  const of = new Map(found.series.map((one) => [one.run, one]));
  const wholeOf = new Map((whole?.x === found.x ? whole.series : []).map((one) => [one.run, one]));
  const some = runs.filter((run) => of.get(run.id)?.x.length || of.get(run.id)?.n_superseded);
  const series = some.map((run) => ({ ...of.get(run.id), whole: wholeOf.get(run.id), id: run.id, label: run.label, slot: run.slot }));
  return { title, x: found.x, series, marks: marks ? marks(found.x) : [] };
}

/** All charts of a view, those whose name has every word of `find`. */
export function ChartGrid({ streams, find, ...shared }) {
  const parts = (find ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const all = titled(streams);
  const found = all.filter(({ stream, metric }) => parts.every((part) => `${stream}/${metric}`.toLowerCase().includes(part)));
  if (!all.length) return html`<${Empty}>No metrics.<//>`;
  if (!found.length) return html`<${Empty}>No chart has this name. <button onClick=${() => setQuery({ find: "" })}>Show all ${all.length}</button><//>`;
  return html`
    <p class="soft phases">${phases(all)}</p>
    <div class="cards">
      ${found.map((one) => html`<${ChartCard} key=${JSON.stringify([one.stream, one.metric])} ...${one} ...${shared} />`)}
    </div>
  `;
}
