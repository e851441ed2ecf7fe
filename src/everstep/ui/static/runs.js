// The list of runs: filtered by the words of `everstep runs`, sorted by the server.

import { html, useEffect, useRef, useState } from "./preact.js";
import { report, useAnswer, useChanges } from "./api.js";
import { link, setQuery } from "./route.js";
import { Empty, Problem, Status, cell } from "./parts.js";
import { count } from "./words.js";

const PAGE = 200; // rows that are shown at first
const MOST = 200; // runs in a comparison

let ticked = new Set(); // ids; they stay while other views are looked at

export function Runs({ query }) {
  const [limit, setLimit] = useState(PAGE);
  const [picked, setPicked] = useState(ticked);
  const changes = useChanges();
  const columns = query.columns ? query.columns.split(",") : undefined;
  const params = { where: query.where, sort: query.sort, desc: query.sort ? (query.desc === "1" ? 1 : 0) : undefined, columns, limit };
  const { answer, error } = useAnswer("/api/runs", params, changes?.version);
  useEffect(() => void (ticked = picked), [picked]);
  const pick = (id) => setPicked((before) => new Set(before.has(id) ? [...before].filter((one) => one !== id) : [...before, id]));
  const isOfColumns = columns?.some((one) => error?.message.includes(`'${one.trim()}'`));
  const compare = (ids) => (location.hash = link("compare", "", { runs: ids.join(",") }));
  const rows = answer?.rows ?? [];
  const ids = picked.size ? [...picked] : rows.slice(0, MOST).map((row) => row.id);
  return html`
    <main class=${`runs ${error && answer ? "stale" : ""}`}>
      <div class="bar">
            ${report
              ? null
              : html`<${Field} name="where" words="Filter runs" value=${query.where ?? ""} hint="best/valid_loss<0.3 status=finished" error=${isOfColumns ? null : error} />
                  <${Field} name="columns" words="Columns" value=${query.columns ?? ""} hint="columns: name,status,config.lr" error=${isOfColumns ? error : null} />`}
            <span class="count" role="status">${error || !answer ? "" : (answer.matched === answer.total ? "" : `${answer.matched.toLocaleString("en")} of `) + count(answer.total, "run")}</span>
            <button class="main" disabled=${ids.length < 2 || ids.length > MOST} onClick=${() => compare(ids)}>Compare ${picked.size || !ids.length ? ids.length : `all ${ids.length}`}</button>
            ${picked.size ? html`<button onClick=${() => setPicked(new Set())}>Clear</button>` : null}
      </div>
      ${error && answer ? html`<p class="soft">Below is the list before this ${isOfColumns ? "choice of columns" : "filter"}.</p>` : null}
      ${!answer
        ? html`<${Empty}>${error ? "" : "Reading runs …"}<//>`
        : !answer.total
          ? html`<${Empty}>No runs yet. A training that uses everstep appears here by itself.<//>`
          : !answer.matched
            ? html`<${Empty}>No run matches this filter. <button onClick=${() => setQuery({ where: "" })}>Show all ${answer.total}</button><//>`
            : html`<${Table} answer=${answer} query=${query} picked=${picked} pick=${pick} />`}
      ${answer && rows.length < answer.matched ? html`<p><button onClick=${() => setLimit(limit + 5 * PAGE)}>Show more</button></p>` : null}
    </main>
  `;
}

/** A field whose words are in the address, a moment after they were typed. */
function Field({ name, words, value, hint, error }) {
  const [text, setText] = useState(value);
  const input = useRef(null);
  const later = useRef(null);
  useEffect(() => {
    if (document.activeElement !== input.current) setText(value);
  }, [value]);
  const typed = (event) => {
    setText(event.target.value);
    clearTimeout(later.current);
    later.current = setTimeout(() => setQuery({ [name]: event.target.value.trim() }), 120);
  };
  return html`
    <div class="filter">
      <input ref=${input} type="search" value=${text} onInput=${typed} aria-label=${words} aria-invalid=${Boolean(error)} spellcheck="false" autocomplete="off" placeholder=${hint} />
      <${Problem} error=${error} />
    </div>
  `;
}

function Table({ answer, query, picked, pick }) {
  const columns = answer.columns.filter((column) => column.name !== "name");
  return html`
    <div class="table" tabindex="-1">
      <table aria-rowcount=${answer.matched}>
        <thead>
          <tr>
            <th class="pick"></th>
            <${Heading} column=${{ name: "name", kind: "text" }} query=${query} />
            ${columns.map((column) => html`<${Heading} key=${column.name} column=${column} query=${query} />`)}
          </tr>
        </thead>
        <tbody>
          ${answer.rows.map(
            (row) => html`<tr key=${row.id} class=${picked.has(row.id) ? "picked" : ""}>
              <td class="pick"><input type="checkbox" checked=${picked.has(row.id)} onChange=${() => pick(row.id)} aria-label=${`Choose ${row.name}`} /></td>
              <th scope="row"><a href=${link("run", row.id)} title=${row.name}>${row.name}</a></th>
              ${columns.map(({ name, kind }) =>
                kind === "status"
                  ? html`<td key=${name}><${Status} status=${row.status} heartbeat=${row.heartbeat} diverged=${row.diverged} /></td>`
                  : html`<td key=${name} class=${`is-${kind}`} title=${cell(row.values[name], kind)}>${cell(row.values[name], kind)}</td>`,
              )}
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
  `;
}

function Heading({ column, query }) {
  const sorted = (query.sort ?? "started") === column.name;
  const down = query.sort ? query.desc === "1" : true; // the server's order where none is asked for
  const next = sorted ? { sort: column.name, desc: down ? "" : "1" } : { sort: column.name, desc: column.kind === "time" ? "1" : "" };
  const order = sorted ? (down ? "descending" : "ascending") : "none";
  return html`<th class=${`is-${column.kind}`} aria-sort=${order} title=${column.name}>
    <button onClick=${() => setQuery(next)}>${column.name}<span aria-hidden="true">${sorted ? (down ? " ↓" : " ↑") : ""}</span></button>
  </th>`;
}
