// The page: what is common to all views, and the choice among them by the address.

import { html, render, useEffect, useState } from "./preact.js";
import { get, onHeard } from "./api.js";
import { link, useRoute } from "./route.js";
import { Runs } from "./runs.js";
import { Run } from "./run.js";
import { Compare } from "./compare.js";
import { Help, useKeys } from "./keys.js";

function Page() {
  const route = useRoute();
  const [help, setHelp] = useState(false);
  const [heard, setHeard] = useState(null);
  const [list, setList] = useState(link("runs"));
  const problems = useProblems();
  useEffect(() => onHeard(setHeard), []);
  useEffect(() => {
    if (route.view === "runs") setList(location.hash || link("runs")); // the way back keeps the filter
    document.title = [route.id, route.view === "compare" ? "Compare" : "", "everstep"].filter(Boolean).join(" – ");
  }, [route]);
  useKeys({ "?": () => setHelp(true), r: () => (location.hash = list) });
  return html`
    <header class="top">
      <a class="brand" href=${link("runs")}><img src="/static/icon.svg" alt="" width="20" height="20" />everstep</a>
      <nav>
        <a href=${list} aria-current=${route.view === "runs" ? "page" : undefined}>Runs</a>
        ${route.view === "run" ? html`<span aria-current="page">${route.id}</span>` : null}
        ${route.view === "compare" ? html`<span aria-current="page">Compare</span>` : null}
      </nav>
      ${problems.length
        ? html`<details class="menu warnings">
            <summary class="warn">${problems.length === 1 ? "1 problem" : `${problems.length} problems`}</summary>
            <ul class="sheet">${problems.map((problem) => html`<li key=${problem}>${problem}</li>`)}</ul>
          </details>`
        : null}
      <span class=${`heard ${heard === false ? "warn" : ""}`} role="status">${heard === false ? "◌ server not heard" : heard ? "● live" : ""}</span>
      <button onClick=${() => setHelp(true)} aria-label="Keys" title="Keys (?)">?</button>
    </header>
    ${route.view === "run" && route.id
      ? html`<${Run} key=${route.id} id=${route.id} query=${route.query} />`
      : route.view === "compare"
        ? html`<${Compare} key=${route.query.runs} query=${route.query} />`
        : html`<${Runs} query=${route.query} />`}
    ${help ? html`<${Help} close=${() => setHelp(false)} />` : null}
  `;
}

/** What keeps the server from reading all that was written; asked for seldom, whatever the view. */
function useProblems() {
  const [problems, setProblems] = useState([]);
  useEffect(() => {
    const ask = () =>
      document.hidden ||
      get("/api/runs", { limit: 1 }).then(
        (answer) => setProblems(answer.problems ?? []),
        () => {}, // the view tells it
      );
    ask();
    const beat = setInterval(ask, 15_000);
    return () => clearInterval(beat);
  }, []);
  return problems;
}

render(html`<${Page} />`, document.getElementById("app"));
