// A setting against a metric, a point for each run: of a comparison, or of all runs that a filter matches.

import { html, useEffect, useMemo, useRef, useState } from "./preact.js";
import { calmly, listen } from "./api.js";
import { link, setQuery } from "./route.js";
import { Empty, Problem, Saves, useAnswer } from "./parts.js";
import { scatterChart } from "./scatter_chart.js";

const MOST = 10_000; // runs in an answer of the server

/** The columns to choose from, {settings: [{name, varied: false or a weight}], metrics, facts}, and the names of the chosen ones. */
export function axesOf(columns, query) {
  const { settings, metrics } = columns;
  const all = Object.values(columns).flat();
  const chosen = (name) => all.find((one) => one.name === name);
  const x = chosen(query.sx) ?? settings.filter((one) => one.varied).sort((a, b) => b.varied - a.varied)[0] ?? settings[0] ?? metrics[0];
  const y = chosen(query.sy) ?? metrics.find((one) => /val.*loss/.test(one.name)) ?? metrics.find((one) => /loss/.test(one.name)) ?? metrics[0];
  return { columns, x: x?.name, y: y?.name };
}

/** The drawing; `axes`: of `axesOf`; `points`: [{label, x, y, slot, id}]. */
export function ScatterView({ axes, points, query }) {
  const box = useRef(null);
  const chart = useRef(null);
  const { x, y } = axes;
  const last = (name) => (!name.startsWith("best/") && axes.columns.metrics.some((one) => one.name === name) ? " (last)" : "");
  const data = useMemo(() => ({ title: `${y}${last(y)} against ${x}${last(x)}`, xName: x, yName: y, points }), [x, y, points]);
  const logX = query.slogx === "1";
  const logY = query.slogy === "1";
  useEffect(() => {
    const options = { logX, logY, height: 460, pick: (at) => (location.hash = link("run", data.points[at].id)) };
    if (chart.current) chart.current.update(data, options);
    else chart.current = scatterChart(box.current, data, options);
  }, [data, logX, logY]);
  useEffect(() => () => chart.current?.destroy(), []);
  const group = ([title, of]) => of.length && html`<optgroup key=${title} label=${title}>${of.map(({ name }) => html`<option key=${name} value=${name}>${name}</option>`)}</optgroup>`;
  const select = (words, name, value) => html`<label>${words} <select aria-label=${`${words} axis`} value=${value} onChange=${(e) => setQuery({ [name]: e.target.value })}>
    ${Object.entries(axes.columns).map(group)}
  </select></label>`;
  const check = (words, name, on) => html`<label class="check"><input type="checkbox" checked=${on} onChange=${() => setQuery({ [name]: on ? "" : "1" })} /> ${words}</label>`;
  return html`
    <div class="bar scatter-bar">
      ${select("x", "sx", x)} ${select("y", "sy", y)} ${check("log x", "slogx", logX)} ${check("log y", "slogy", logY)}
      <${Saves} name=${data.title} as=${{ PNG: () => chart.current.png(), CSV: () => chart.current.csv() }} />
    </div>
    <section class="card wide" aria-label=${data.title}><div ref=${box}></div></section>
  `;
}

/** The runs that a filter of the list matches. */
export function MatchedRuns({ query }) {
  const [version, setVersion] = useState(0);
  useEffect(() => {
    const again = calmly(() => setVersion((before) => before + 1), 3000);
    const stop = listen([], { changed: again, back: again });
    return () => (stop(), again.stop());
  }, []);
  const { where } = query;
  const columns = useAnswer("/api/columns", { where }, version);
  const axes = columns.answer && axesOf(columns.answer, query);
  const named = axes?.x && axes.y;
  const params = { where, columns: named ? [axes.x, axes.y] : [], sort: "name", limit: MOST };
  const { answer, error } = useAnswer(named && !columns.error ? "/api/runs" : null, params, version);
  const points = useMemo(() => {
    const [x, y] = (answer?.columns ?? []).map((column) => column.name);
    return (answer?.rows ?? []).map((row) => ({ label: row.name, id: row.id, slot: 0, x: row.values[x], y: row.values[y ?? x] }));
  }, [answer]);
  if (columns.error) return null; // the filter tells it
  if (error) return html`<${Problem} error=${error} />`;
  if (axes && !named) return html`<${Empty}>No setting or metric of these runs is a number.<//>`;
  if (!answer) return html`<${Empty}>Reading runs …<//>`;
  const left = answer.matched - points.length;
  return html`
    <${ScatterView} axes=${axes} points=${points} query=${query} />
    ${left > 0 ? html`<p class="soft">The first ${MOST.toLocaleString("en")} runs by name; ${left.toLocaleString("en")} more match: narrow the filter.</p>` : null}
  `;
}
