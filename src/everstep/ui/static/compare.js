// Several runs side by side: their charts in one, their settings and metrics in tables, a setting against a metric.

import { html, useEffect, useMemo, useRef, useState } from "./preact.js";
import { calmly, listen } from "./api.js";
import { link, setQuery } from "./route.js";
import { Empty, Problem, ReportCommand, Swatch, Tabs, useAnswer } from "./parts.js";
import { ScatterView, axesOf } from "./scatter_view.js";
import { clock, format, recorded } from "./words.js";
import { ChartBar, ChartGrid, looks } from "./chart_view.js";
import { useKeys } from "./keys.js";
import { showGoingOn } from "./dom.js";

const TABS = [["charts", "Charts"], ["settings", "Settings"], ["metrics", "Metrics"], ["scatter", "Scatter"]];
const MOST = 200;
const LIVE = 12; // more runs than these are fetched again less often

export function Compare({ query }) {
  const ids = useMemo(() => (query.runs ?? "").split(",").filter(Boolean).slice(0, MOST), [query.runs]);
  const [version, setVersion] = useState(0);
  const { answer, error } = useAnswer(ids.length ? "/api/compare" : null, { runs: ids.join(",") }, version);
  const hidden = useMemo(() => new Set((query.hide ?? "").split(",").filter(Boolean)), [query.hide]);
  const [changed, setChanged] = useState({});
  useEffect(() => {
    const news = new Set();
    const told = calmly(() => {
      const found = [...news];
      news.clear();
      setChanged((before) => ({ ...before, ...Object.fromEntries(found.map((id) => [id, (before[id] ?? 0) + 1])) }));
    }, ids.length > LIVE ? 3000 : 1000);
    const again = calmly(() => setVersion((before) => before + 1), 3000);
    const stop = listen(ids, {
      changed: (found) => found.some((id) => ids.includes(id)) && again(),
      points: ({ run }) => (news.add(run), told()),
      back: () => (ids.forEach((id) => news.add(id)), told(), again()),
    });
    return () => (stop(), told.stop(), again.stop());
  }, [ids]);
  const tab = TABS.some(([name]) => name === query.tab) ? query.tab : "charts";
  const choose = (name) => setQuery({ tab: name === "charts" ? "" : name }, false);
  useKeys({
    ...Object.fromEntries(TABS.map(([name], i) => [String(i + 1), () => choose(name)])),
    d: () => setQuery({ all: query.all === "1" ? "" : "1" }),
  });
  const runs = useMemo(() => {
    return ids.map((id, i) => ({ id, label: answer?.runs[i]?.name ?? id, slot: i, zero: answer?.runs[i]?.created ?? 0 }));
  }, [ids, answer]);
  if (!ids.length) return html`<main><${Empty}>Choose runs in the <a href=${link("runs")}>list</a>, then compare them.<//></main>`;
  const toggle = (id) => setQuery({ hide: (hidden.has(id) ? [...hidden].filter((each) => each !== id) : [...hidden, id]).join(",") });
  const shown = runs.filter((run) => !hidden.has(run.id));
  const paths = answer?.facts.find((row) => row.name === "path")?.values ?? [];
  const sent = paths.every(Boolean) ? paths.filter((_, i) => !hidden.has(ids[i])) : [];
  return html`
    <main class="compare">
      <${Problem} error=${error} />
      <aside aria-label="Runs">
        <h2>${runs.length} runs</h2>
        <ul>
          ${runs.map(
            (run) => html`<li key=${run.id} class=${hidden.has(run.id) ? "off" : ""}>
              <label class="check"><input type="checkbox" checked=${!hidden.has(run.id)} onChange=${() => toggle(run.id)} /><${Swatch} slot=${run.slot} /></label>
              <a href=${link("run", run.id)} title=${run.label}>${run.label}</a>
            </li>`,
          )}
        </ul>
        ${sent.length ? html`<p class="soft send">To send this comparison as a file: <${ReportCommand} directories=${sent} name="comparison" /></p>` : null}
      </aside>
      <div class="compare-main">
        <${Tabs} names=${TABS} chosen=${tab} choose=${choose} />
        <div role="tabpanel">
          ${!answer
            ? error
              ? null
              : html`<${Empty}>Reading the runs …<//>`
            : tab === "charts"
              ? html`<${Charts} runs=${shown} streams=${answer.streams} query=${query} changed=${changed} />`
              : tab === "scatter"
                ? html`<${Scatter} answer=${answer} runs=${runs} hidden=${hidden} query=${query} />`
                : html`<${SideBySide} rows=${tab === "metrics" ? measured(answer.metrics) : [...answer.settings, ...answer.facts.map((row) => ({ ...row, isFact: true }))]} runs=${runs} all=${query.all === "1"} />`}
        </div>
      </div>
    </main>
  `;
}

// ----------------------------------------------------------------------------------------- charts

function Charts({ runs, streams, query, changed }) {
  const find = useRef(null);
  const look = { ...looks(query), legend: false }; // the list beside the charts is their legend
  const pick = (id) => (location.hash = link("run", id));
  return html`
    <${ChartBar} look=${look} part=${query.find ?? ""} find=${find} />
    <${ChartGrid} streams=${streams} find=${query.find} runs=${runs} look=${look} changed=${changed} pick=${pick} />
  `;
}

// ----------------------------------------------------------------------------------------- tables

const TIMES = new Set(["created", "started", "heartbeat"]);
const key = (value) => JSON.stringify(value ?? null);
/** A metric as people read it; a setting or an identifier as it was given: 16-digit numbers, and no commas. */
const text = (row, value) => (row.better && typeof value === "number" ? format(value) : recorded(row.name, value));

/** What the cells of a row say, and what of it is shown: of long values with a common begin, the end that differs. */
function texts(row) {
  const texts = row.values.map((value) => (TIMES.has(row.name) && value ? clock(value) : text(row, value)));
  const there = texts.filter((_, i) => typeof row.values[i] !== "number" && (row.values[i] ?? null) !== null);
  let same = 0;
  while (there.length > 1 && same < there[0].length && there.every((one) => one[same] === there[0][same])) same++;
  const cut = same > 20 && there.some((one) => one !== there[0]);
  return { texts, shown: texts.map((one, i) => (cut && there.includes(one) ? `…${one.slice(same - 8)}` : one)) };
}

/** A row for the last value of each metric, and one for its best, where the name tells which is better. */
const measured = (metrics) => metrics.flatMap(({ name, values, best, better }) => [{ name: `${name} last`, values, better: better ?? "none" }, ...(best ? [{ name: `${name} best`, values: best, better }] : [])]);

/** Places of the best values of a row. */
function winners({ values, better }) {
  const numbers = values.filter((value) => typeof value === "number");
  if (!["min", "max"].includes(better) || numbers.length < 2) return new Set();
  const best = Math[better](...numbers);
  return new Set(values.flatMap((value, i) => (value === best ? [i] : [])));
}

function SideBySide({ rows, runs, all }) {
  const usual = (values) => {
    const count = new Map();
    for (const value of values.map(key)) count.set(value, (count.get(value) ?? 0) + 1);
    return count.size < 2 ? null : [...count].sort((a, b) => b[1] - a[1])[0];
  };
  const of = (isFact) => rows.filter((row) => Boolean(row.isFact) === isFact).length;
  const differ = (isFact) => judged.filter((row) => Boolean(row.isFact) === isFact && row.usual).length;
  const box = useRef(null);
  const judged = rows.map((row) => ({ ...row, usual: usual(row.values), best: winners(row), ...texts(row) }));
  const shown = judged.filter((row) => all || row.usual);
  useEffect(() => (shown.length ? showGoingOn(box.current) : undefined), [shown.length > 0]);
  return html`
    <div class="bar">
      <label class="check"><input type="checkbox" checked=${!all} onChange=${() => setQuery({ all: all ? "" : "1" })} /> only what differs</label>
      <span class="soft">${rows.some((row) => row.isFact) ? `${differ(false)} of ${of(false)} settings and ${differ(true)} of ${of(true)} facts of the runs differ` : `${shown.length} of ${rows.length}`}</span>
    </div>
    ${shown.length
      ? html`<div class="wide-table" ref=${box}><table class="list side">
          <thead><tr><th></th>${runs.map((run) => html`<th key=${run.id}><${Swatch} slot=${run.slot} /> <a href=${link("run", run.id)} title=${run.label}>${run.label}</a></th>`)}</tr></thead>
          <tbody>
            ${shown.map(
              (row, at) => html`${row.isFact && !shown[at - 1]?.isFact ? html`<tr key="/facts" class="facts-head"><th scope="rowgroup">facts of the runs</th></tr>` : null}<tr key=${row.name}>
                <th scope="row" title=${row.name}>${row.usual ? html`<span class="mark">≠</span>` : null}${row.name}</th>
                ${row.values.map((value, i) => {
                  const other = !row.better && !row.isFact && row.usual && (row.usual[1] === 1 || key(value) !== row.usual[0]);
                  return html`<td key=${i} class=${`${typeof value === "number" ? "number " : ""}${other ? "other" : ""}`} title=${row.texts[i]}>${other ? html`<span class="mark">≠</span>` : null}${row.best.has(i) ? html`<span class="mark" title="the best of these runs">★</span>` : null}${row.shown[i]}</td>`;
                })}
              </tr>`,
            )}
          </tbody>
        </table></div>`
      : html`<${Empty}>${rows.length ? "These runs are equal here." : "Nothing was recorded."}<//>`}
  `;
}

// ---------------------------------------------------------------------------------------- scatter

const numeric = (row) => row.values.filter((value) => typeof value === "number").length > 1;
const column = (row) => ({ name: row.name, varied: new Set(row.values).size > 1 && (/seed$/.test(row.name) ? 1 : new Set(row.values).size) });

function Scatter({ answer, runs, hidden, query }) {
  const settings = answer.settings.filter(numeric);
  const metrics = answer.metrics.filter(numeric);
  const axes = axesOf({ settings: settings.map(column), metrics: metrics.map(column) }, query);
  const points = useMemo(() => {
    const [x, y] = [axes.x, axes.y].map((name) => [...settings, ...metrics].find((row) => row.name === name));
    return x && y ? runs.map((run, i) => ({ label: run.label, slot: run.slot, x: x.values[i], y: y.values[i], id: run.id })).filter((run) => !hidden.has(run.id)) : null;
  }, [answer, axes.x, axes.y, runs, hidden]);
  if (!points) return html`<${Empty}>No setting or metric of these runs is a number.<//>`;
  return html`<${ScatterView} axes=${axes} points=${points} query=${query} />`;
}
