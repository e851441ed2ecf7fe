// The page: what is common to all views, and the choice among them by the address.

import { html, render, useEffect, useState } from "./preact.js";
import { onHeard, report } from "./api.js";
import { link, useRoute } from "./route.js";
import { Runs } from "./runs.js";
import { Run } from "./run.js";
import { Compare } from "./compare.js";

/** Address of the comparison in a report of several runs. */
const everyRun = report?.runs.length > 1 ? link("compare", "", { runs: report.runs.map((run) => run.id).join(",") }) : null;

function Page() {
  const route = useRoute();
  const [{ heard, problems }, setHeard] = useState({ heard: null, problems: [] });
  const [list, setList] = useState(link("runs"));
  useEffect(() => onHeard(setHeard), []);
  useEffect(() => {
    if (route.view === "runs") setList(location.hash || link("runs")); // the way back keeps the filter
    if (!report) document.title = [route.id, route.view === "compare" ? "Compare" : "", "everstep"].filter(Boolean).join(" – ");
  }, [route]);
  return html`
    <header class="top">
      <a class="brand" href=${link("runs")}>${report ? null : html`<img src="/static/icon.svg" alt="" width="20" height="20" />`}everstep</a>
      <nav>
        <a href=${list} aria-current=${route.view === "runs" ? "page" : undefined}>Runs</a>
        ${route.view === "run" ? html`<span aria-current="page">${report ? report.runs[route.id]?.name : route.id}</span>` : null}
        ${route.view === "compare" ? html`<span aria-current="page">Compare</span>` : everyRun ? html`<a href=${everyRun}>Compare</a>` : null}
      </nav>
      ${problems.length
        ? html`<details class="menu warnings">
            <summary class="warn">${problems.length === 1 ? "1 problem" : `${problems.length} problems`}</summary>
            <ul class="sheet">${problems.map((problem) => html`<li key=${problem}>${problem}</li>`)}</ul>
          </details>`
        : null}
      <span class=${`heard ${heard === false ? "warn" : ""}`} role="status">${heard === false ? "◌ server not heard" : heard ? "● live" : ""}</span>
    </header>
    ${route.view === "run" && route.id
      ? html`<${Run} key=${route.id} id=${route.id} query=${route.query} />`
      : route.view === "compare"
        ? html`<${Compare} key=${route.query.runs} query=${route.query} />`
        : html`<${Runs} query=${route.query} />`}
  `;
}

addEventListener("keydown", (event) => {
  const field = document.querySelector("main input[type=search]");
  if (event.key !== "/" || event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input[type=search]") || !field) return;
  event.preventDefault();
  field.focus();
});

/** Tell beside the hash in a report's footer whether the data that it carries have it. */
async function verify(stated) {
  const text = document.getElementById("data").textContent;
  const bytes = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text)));
  const found = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  stated.after(found === stated.textContent ? " ✓ verified in this browser" : ` ≠ the data were changed: they have ${found}`);
}

if (report && globalThis.crypto?.subtle) verify(document.getElementById("hash"));
if (report && !location.hash) location.replace(everyRun ?? link("run", report.runs[0].id));
render(html`<${Page} />`, document.getElementById("app"));
