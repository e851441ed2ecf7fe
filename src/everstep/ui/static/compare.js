// Several runs side by side: their charts in one, and the settings in which they differ.

import { html, useMemo } from "./preact.js";
import { useAnswer, useChanges } from "./api.js";
import { link, setQuery } from "./route.js";
import { Empty, Problem, Share, Swatch } from "./parts.js";
import { ChartBar, ChartGrid, looks } from "./chart_view.js";
import { duration, format, words } from "./words.js";

const MOST = 200;
const FACTS = ["status", "step", "duration"];

export function Compare({ query }) {
  const ids = useMemo(() => (query.runs ?? "").split(",").filter(Boolean).slice(0, MOST), [query.runs]);
  const hidden = useMemo(() => new Set((query.hide ?? "").split(",").filter(Boolean)), [query.hide]);
  const changes = useChanges(ids);
  const { answer, error } = useAnswer(ids.length ? "/api/compare" : null, { runs: ids.join(",") }, changes?.version);
  const runs = useMemo(
    () => ids.map((id, slot) => ({ id, label: answer?.runs[slot]?.name ?? id, slot })),
    [ids, answer],
  );
  if (!ids.length) return html`<main><${Empty}>Choose runs in the <a href=${link("runs")}>list</a>, then compare them.<//></main>`;
  const toggle = (id) => setQuery({ hide: (hidden.has(id) ? [...hidden].filter((each) => each !== id) : [...hidden, id]).join(",") });
  const look = { ...looks(query), legend: false }; // the list beside the charts is their legend
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
        ${answer ? html`<${Share} runs=${answer.runs} />` : null}
      </aside>
      <div class="compare-main">
        ${answer
          ? html`<${ChartBar} look=${look} part=${query.find ?? ""} />
              <${ChartGrid} streams=${answer.streams} find=${query.find} runs=${runs.filter((run) => !hidden.has(run.id))} look=${look}
                changed=${changes.sizes} pick=${(id) => (location.hash = link("run", id))} />
              <${Settings} results=${[...FACTS.map((name) => ({ name, values: answer.runs.map((run) => run[name]) })), ...answer.results]} rows=${answer.settings} runs=${runs} />`
          : html`<${Empty}>${error ? "" : "Reading the runs …"}<//>`}
      </div>
    </main>
  `;
}

const Settings = ({ results, rows, runs }) =>
  html`<section><h2>Result, and settings that differ</h2>
        <div class="wide-table"><table class="list side">
          <thead><tr><th></th>${runs.map((run) => html`<th key=${run.id}><${Swatch} slot=${run.slot} /> <a href=${link("run", run.id)} title=${run.label}>${run.label}</a></th>`)}</tr></thead>
          <tbody>
            ${[...results, ...rows].map((row) => html`<tr key=${row.name}><th scope="row">${row.name}</th>${row.values.map((value, i) => html`<td key=${i}>${row.name === "duration" ? duration(value ?? 0) : typeof value === "number" && results.includes(row) ? format(value) : words(value ?? undefined)}</td>`)}</tr>`)}
          </tbody>
        </table></div>
      </section>`;
