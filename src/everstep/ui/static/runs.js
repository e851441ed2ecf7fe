// The list of runs: filtered by the words of `everstep runs`, sorted by the server, drawn where it is visible.

import { html, useCallback, useEffect, useMemo, useRef, useState } from "./preact.js";
import { calmly, get, listen } from "./api.js";
import { link, setQuery } from "./route.js";
import { Empty, Problem, Status, cell } from "./parts.js";
import { MatchedRuns } from "./scatter_view.js";
import { useKeys } from "./keys.js";
import { showGoingOn } from "./dom.js";
import { count } from "./words.js";

const ROW = 32; // pixels; style.css has the same height
const PAGE = 100; // runs in an answer
const MOST = 200; // runs in a comparison

const REMEMBERED = "everstep columns";

/** The columns that were chosen last, for addresses without any; "" where nothing is kept. */
function columnsKept(chosen) {
  try {
    if (chosen !== undefined) sessionStorage.setItem(REMEMBERED, chosen);
    return sessionStorage.getItem(REMEMBERED) ?? "";
  } catch {
    return ""; // a browser that keeps nothing
  }
}

let ticked = new Set(); // ids; they stay while other views are looked at

export function Runs({ query }) {
  useEffect(() => {
    if (query.columns === undefined && columnsKept()) setQuery({ columns: columnsKept() });
  }, [query.columns]);
  const list = useList(query);
  const { answer, rows, problem } = list;
  const [at, setAt] = useState(0);
  const [picked, setPicked] = useState(ticked);
  useEffect(() => void (ticked = picked), [picked]);
  const pick = (id) => setPicked((before) => (before.has(id) ? without(before, id) : new Set([...before, id])));
  const open = (row) => row && (location.hash = link("run", row.id));
  const compare = (ids) => (location.hash = link("compare", "", { runs: ids.join(",") }));
  const scatter = query.scatter === "1";
  const filter = useRef(null);
  const table = useRef(null);

  const move = (by) => {
    const next = Math.max(0, Math.min((answer?.matched ?? 1) - 1, at + by));
    setAt(next);
    table.current?.show(next);
  };
  const inTable = {
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    Enter: () => open(rows.get(at)),
    x: () => rows.get(at) && pick(rows.get(at).id),
  };
  useKeys({
    ...(scatter ? {} : inTable),
    c: () => picked.size > 1 && compare([...picked]),
    "/": () => filter.current.focus(),
  });
  useEffect(() => setAt(0), [query.where, query.sort, query.desc]);
  const several = Math.min(MOST, answer?.matched ?? 0);
  const compareAll = async () => compare((await get("/api/runs", { ...list.params, offset: 0, limit: several })).rows.map((row) => row.id));

  return html`
    <main class=${`runs ${problem && answer ? "stale" : ""}`}>
      <div class="bar">
        <${Filter} input=${filter} value=${query.where ?? ""} error=${problem} />
        <span class="count" role="status">${problem ? "" : answer ? counted(answer) : ""}</span>
        <${Columns} answer=${answer} chosen=${columnsOf(query)} />
        <label class="check"><input type="checkbox" checked=${query.group === "1"} onChange=${(e) => setQuery({ group: e.target.checked ? "1" : "" })} /> Groups</label>
        <button aria-pressed=${scatter} onClick=${() => setQuery({ scatter: scatter ? "" : "1" }, false)} title="A setting against a metric, a point for each run that matches">Scatter</button>
        ${picked.size
          ? html`<button class="main" disabled=${picked.size < 2 || picked.size > MOST} onClick=${() => compare([...picked])}>Compare ${picked.size}</button>
              <button onClick=${() => setPicked(new Set())}>Clear</button>`
          : html`<button hidden=${several < 2} onClick=${compareAll} title="Overlay the runs that match, the first ${MOST} at most">Compare ${several === answer?.matched ? "all" : `first ${several}`}</button>`}
      </div>
      ${problem && answer ? html`<p class="soft">Below is the list before this filter.</p>` : (answer?.notes ?? []).map((note) => html`<p key=${note} class="soft">${note}</p>`)}
      ${answer && !answer.total
        ? html`<${Empty}>No runs yet. A training that uses everstep appears here by itself.<//>`
        : answer && !answer.matched
          ? html`<${Empty}>No run matches this filter. ${answer.why_none} <button onClick=${() => setQuery({ where: "" })}>Show all ${answer.total}</button><//>`
          : answer
            ? scatter
              ? html`<${MatchedRuns} query=${query} />`
              : html`<${Table} handle=${table} list=${list} query=${query} at=${at} picked=${picked} pick=${pick} choose=${setAt} />`
            : problem
              ? null
              : html`<${Empty}>Reading runs …<//>`}
    </main>
  `;
}

const without = (set, id) => new Set([...set].filter((each) => each !== id));

const counted = ({ matched, total }) => (matched === total ? "" : `${matched.toLocaleString("en")} of `) + count(total, "run");

// ------------------------------------------------------------------------------------------- data

/** Pages of the answer, fetched when they become visible, and again when something changes. */
function useList(query) {
  const group = query.group === "1";
  const params = useMemo(
    () => ({
      where: query.where,
      sort: query.sort,
      desc: query.sort ? (query.desc === "1" ? 1 : 0) : undefined,
      grouped: group ? 1 : undefined,
      columns: columnsOf(query),
    }),
    [query.where, query.sort, query.desc, query.columns, group],
  );
  const [answer, setAnswer] = useState(null);
  const [problem, setProblem] = useState(null);
  const pages = useRef({ rows: new Map(), asked: new Set(), of: null, wanted: [0] });
  const own = pages.current;
  if (own.of !== params) Object.assign(own, { of: params, asked: new Set(), stale: true, wanted: [0] });

  const load = useCallback(
    (page) => {
      own.asked.add(page);
      get("/api/runs", { ...params, offset: page * PAGE, limit: PAGE })
        .then((found) => {
          if (own.of !== params) return;
          if (own.stale) own.rows.clear();
          own.stale = false;
          found.rows.forEach((row, i) => own.rows.set(page * PAGE + i, row));
          setAnswer({ ...found, rows: undefined });
          setProblem(null);
        })
        .catch((error) => own.of === params && setProblem(error));
    },
    [params],
  );
  const want = useCallback(
    (first, last) => {
      own.wanted = [];
      for (let page = Math.floor(first / PAGE); page <= Math.floor(last / PAGE); page++) {
        own.wanted.push(page);
        if (!own.asked.has(page)) load(page);
      }
    },
    [load],
  );
  useEffect(() => load(0), [load]);
  useEffect(() => {
    const again = calmly(() => {
      own.asked = new Set(own.wanted);
      own.wanted.forEach(load);
    }, 1000);
    const stop = listen([], { changed: again, back: again });
    const beat = setInterval(again, 15_000); // heartbeats grow old without any event
    return () => (stop(), again.stop(), clearInterval(beat));
  }, [load]);
  return { params, answer, problem, rows: own.rows, want };
}

// ---------------------------------------------------------------------------------- filter, columns

function Filter({ input, value, error }) {
  const [text, setText] = useState(value);
  useEffect(() => {
    if (document.activeElement !== input.current) setText(value);
  }, [value]);
  const later = useRef(null);
  const typed = (event) => {
    setText(event.target.value);
    clearTimeout(later.current);
    later.current = setTimeout(() => setQuery({ where: event.target.value.trim() }), 120);
  };
  return html`
    <div class="filter">
      <input ref=${input} type="search" value=${text} onInput=${typed} aria-label="Filter runs" aria-invalid=${Boolean(error)} spellcheck="false" autocomplete="off"
        placeholder="valid_loss<0.3 status=finished" title="Comparisons as in everstep runs, or JSON as in everstep runs --where" />
      <${Problem} error=${error} />
    </div>
  `;
}

// In the address a comma separates names; a comma of a name is %2C there.
const columnsOf = (query) => (query.columns ? query.columns.split(",").map((name) => name.replaceAll("%2C", ",").replaceAll("%25", "%")) : undefined);
const columnsWritten = (names) => names.map((name) => name.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");

function Columns({ answer, chosen }) {
  const [open, setOpen] = useState(false);
  const [part, setPart] = useState("");
  const box = useRef(null);
  const search = useRef(null);
  useEffect(() => {
    if (!open) return undefined;
    search.current.focus();
    const outside = (event) => !box.current.contains(event.target) && setOpen(false);
    const escape = (event) => event.key === "Escape" && setOpen(false);
    addEventListener("pointerdown", outside);
    addEventListener("keydown", escape);
    return () => (removeEventListener("pointerdown", outside), removeEventListener("keydown", escape));
  }, [open]);
  const shown = chosen ?? (answer?.columns ?? []).map((column) => column.name); // as asked for, before the answer
  const choose = (columns) => (columnsKept(columns), setQuery({ columns }));
  const toggle = (name) => choose(columnsWritten(shown.includes(name) ? shown.filter((each) => each !== name) : [...shown, name]));
  const differing = (answer?.differing ?? []).filter((name) => !shown.includes(name));
  const found = [...differing, ...(answer?.choices ?? []).filter((name) => !differing.includes(name))].filter((name) => name.toLowerCase().includes(part.toLowerCase()));
  return html`
    <div class="menu" ref=${box}>
      <button aria-expanded=${open} onClick=${() => setOpen(!open)} title=${differing.join(", ")}>Columns${differing.length ? html` <small class="soft">${differing.length} more ${differing.length === 1 ? "setting differs" : "settings differ"}</small>` : null}</button>
      ${open
        ? html`<div class="sheet">
            <input ref=${search} type="search" value=${part} onInput=${(e) => setPart(e.target.value)} placeholder="Find a column" aria-label="Find a column" />
            <div class="choices">
              ${found.slice(0, 300).map(
                (name) => html`<label key=${name} class="check"><input type="checkbox" checked=${shown.includes(name)} onChange=${() => toggle(name)} /><span>${name}</span></label>`,
              )}
              ${found.length > 300 ? html`<p class="soft">and ${found.length - 300} more</p>` : null}
            </div>
            <p class="soft">${count(found.length, "column")}: best/… and metrics are best and last values, config.… are settings</p>
            ${chosen ? html`<button onClick=${() => choose("")}>Default columns</button>` : null}
          </div>`
        : null}
    </div>
  `;
}

// ------------------------------------------------------------------------------------------- table

const WIDTHS = { number: 88, time: 152, text: 112, status: 124 };

/** Pixels of a column: its heading is never cut, and the status of a running or diverged run needs more. */
function widthOf(column, rows) {
  const long = column.kind === "status" && [...rows.values()].some((row) => row.status === "running" || row.diverged !== null);
  const words = short(column.name.replace(/^best\//, "")).length + ({ best: 5, last: 5 }[column.of] ?? 0);
  return Math.max(long ? 226 : WIDTHS[column.kind], 34 + 7 * words);
}

/** Pixels of the column of names: those that are long end in dots. */
const nameWidth = (rows) => Math.max(140, Math.min(280, 24 + 8.4 * Math.max(0, ...[...rows.values()].map((row) => row.name.length))));

function Table({ handle, list, query, at, picked, pick, choose }) {
  const { answer, rows, want } = list;
  const box = useRef(null);
  const [view, setView] = useState([0, 40]);
  const measured = () => {
    const first = Math.max(0, Math.floor(box.current.scrollTop / ROW) - 10);
    const last = first + Math.ceil(box.current.clientHeight / ROW) + 20;
    setView((before) => (before[0] === first && before[1] === last ? before : [first, last]));
  };
  useEffect(() => {
    const watch = new ResizeObserver(measured);
    watch.observe(box.current);
    const end = showGoingOn(box.current);
    return () => (watch.disconnect(), end());
  }, []);
  handle.current = {
    show(row) {
      const top = row * ROW;
      const room = box.current.clientHeight - 2 * ROW;
      if (top < box.current.scrollTop) box.current.scrollTop = top;
      else if (top > box.current.scrollTop + room) box.current.scrollTop = top - room;
    },
  };
  const first = Math.min(view[0], answer.matched);
  const last = Math.min(view[1], answer.matched);
  useEffect(() => want(first, Math.max(first, last - 1)), [first, last, want]);

  const group = query.group === "1";
  const columns = answer.columns.filter((column) => column.name !== "name");
  const before = useRef(columns.length);
  useEffect(() => {
    if (columns.length > before.current) box.current.scrollLeft = box.current.scrollWidth; // a column that was added is the last
    before.current = columns.length;
  }, [columns.length]);
  const visible = Array.from({ length: last - first }, (_, i) => first + i);
  const named = nameWidth(rows);
  const widths = columns.map((column) => widthOf(column, rows));
  const width = widths.reduce((sum, one) => sum + one, 34 + (group ? 170 : 0) + named);
  return html`
    <div class="table" ref=${box} onScroll=${measured} tabindex="-1">
      <table style=${{ minWidth: `${width}px` }} aria-rowcount=${answer.matched}>
        <colgroup>
          <col style=${{ width: "34px" }} />${group ? html`<col style=${{ width: "170px" }} />` : null}<col class="names" style=${{ width: `${named}px` }} />
          ${columns.map((column, i) => html`<col key=${column.name} style=${{ width: `${widths[i]}px` }} />`)}<col />
        </colgroup>
        <thead>
          <tr>
            <th class="pick"></th>${group ? html`<th class="plain">sweep</th>` : null}
            <${Heading} column=${{ name: "name", kind: "text" }} query=${query} fixed="fixed" />
            ${columns.map((column) => html`<${Heading} key=${column.name} column=${column} query=${query} />`)}<th></th>
          </tr>
        </thead>
        <tbody>
          <tr class="space" style=${{ height: `${first * ROW}px` }}></tr>
          ${visible.map((i) => html`<${Row} key=${i} row=${rows.get(i)} above=${rows.get(i - 1)} top=${i === first} group=${group} columns=${columns} at=${i === at} picked=${picked.has(rows.get(i)?.id)} pick=${pick} choose=${() => choose(i)} />`)}
          <tr class="space" style=${{ height: `${(answer.matched - last) * ROW}px` }}></tr>
        </tbody>
      </table>
    </div>
  `;
}

function Heading({ column, query, fixed }) {
  const sorted = (query.sort ?? "started") === column.name;
  const down = query.sort ? query.desc === "1" : true; // the server's order where none is asked for
  const next = sorted ? { sort: column.name, desc: down ? "" : "1" } : { sort: column.name, desc: column.kind === "time" ? "1" : "" };
  const order = sorted ? (down ? "descending" : "ascending") : "none";
  return html`<th class=${`is-${column.kind} ${fixed ?? ""}`} aria-sort=${order} title=${column.name}>
    <button onClick=${() => setQuery(next)}><span>${column.of === "best" ? html`<small>best</small> ${short(column.name.replace(/^best\//, ""))}` : short(column.name)}${column.of === "last" ? html` <small>last</small>` : null}</span><span aria-hidden="true">${sorted ? (down ? " ↓" : " ↑") : ""}</span></button>
  </th>`;
}

/** A name, or the last parts of a long path: they tell more than the first. */
function short(name) {
  if (name.length <= 15) return name;
  const parts = name.split(".");
  let tail = parts.pop();
  while (parts.length && tail.length + parts.at(-1).length < 14) tail = `${parts.pop()}.${tail}`;
  return `…${tail}`;
}

function Row({ row, above, top, group, columns, at, picked, pick, choose }) {
  if (!row) return html`<tr class="waiting"><td colspan=${columns.length + 4}></td></tr>`;
  const begins = group && (top || above?.sweep !== row.sweep);
  return html`
    <tr class=${`${at ? "at " : ""}${picked ? "picked " : ""}${begins ? "begins" : ""}`} onClick=${choose} aria-selected=${picked}>
      <td class="pick"><input type="checkbox" checked=${picked} onChange=${() => pick(row.id)} aria-label=${`Choose ${row.name}`} /></td>
      ${group ? html`<td class="sweep">${begins ? (row.sweep ?? html`<span class="soft">no sweep</span>`) : ""}</td>` : null}
      <th scope="row"><a href=${link("run", row.id)} title=${row.name}>${row.name}</a></th>
      ${columns.map((column) =>
        column.kind === "status"
          ? html`<td key=${column.name}><${Status} status=${row.status} heartbeat=${row.heartbeat} diverged=${row.diverged} /></td>`
          : column.name === "verified" && row.values.verified === undefined
          ? html`<td key="verified" class="soft" title="A start that resumes is verified; this run has none that executed a step">no resume</td>`
          : html`<td key=${column.name} class=${`is-${column.kind}`} title=${cell(row.values[column.name], column.kind)}>${cell(row.values[column.name], column.kind)}</td>`,
      )}<td></td>
    </tr>
  `;
}
