// One run: how it went, its charts, and all that was recorded about it.

import { html, useEffect, useMemo, useRef, useState } from "./preact.js";
import { runPath, summaryAddress, summaryText, useAnswer, useChanges } from "./api.js";
import { drawTimeline, marks, timelinePng } from "./timeline.js";
import { link, setQuery } from "./route.js";
import { Empty, Icon, Pairs, Problem, Saves, Share, Status, Tabs, leaves } from "./parts.js";
import { bests, bytes, clock, count, duration, format, recorded, words } from "./words.js";
import { enlarge, made } from "./dom.js";
import { histogram } from "./histogram.js";
import { ChartBar, ChartGrid, looks } from "./chart_view.js";

const TABS = [
  ["charts", "Charts"],
  ["summaries", "Images and text"],
  ["config", "Config"],
  ["environment", "Code and machine"],
  ["checkpoints", "Checkpoints"],
  ["log", "Log"],
];

export function Run({ id, query }) {
  const changes = useChanges(useMemo(() => [id], [id]));
  const { answer: run, error } = useAnswer(runPath(id), {}, changes?.version);
  const tab = TABS.some(([name]) => name === query.tab) ? query.tab : "charts";
  const choose = (name) => setQuery({ tab: name === "charts" ? "" : name }, false);
  if (!run) return html`<main><${Problem} error=${error} />${error ? null : html`<${Empty}>Reading the run …<//>`}</main>`;
  const View = VIEWS[tab];
  return html`
    <main class="run">
      <${Problem} error=${error} />
      <${Facts} run=${run} />
      <${Timeline} run=${run} />
      ${run.failures.length ? html`<${Failures} run=${run} />` : null}
      <${Tabs} names=${TABS} chosen=${tab} choose=${choose} />
      <div role="tabpanel"><${View} run=${run} query=${query} changed=${changes.sizes} /></div>
    </main>
  `;
}

/** What is recorded under some names. */
const part = (facts, names) => Object.fromEntries(names.filter((name) => name in facts).map((name) => [name, facts[name]]));
const CODE = ["git", "argv", "cwd", "packages", "services"];
const MACHINE = ["host", "platform", "python", "fingerprint", "backends", "ranks"];

const RESUMABLE = new Set(["failed", "killed", "stopped"]);

const MOST_SETTINGS = 8;
const TELLING = /(^|[._])(lr|rate|learning_rate|batch_size|optimizer|weight_decay|momentum|dropout|width|depth|hidden|layers|model|dataset)(\.name)?$/;

/** The settings that tell most: all of a small config, else those with a usual name. */
function settings(config) {
  const plain = leaves(config).filter(([name, value]) => name !== "name" && name !== "seed" && ["number", "string", "boolean"].includes(typeof value) && String(value).length <= 40);
  const found = plain.length <= MOST_SETTINGS ? plain : plain.filter(([name]) => TELLING.test(name));
  return found.slice(0, MOST_SETTINGS).map(([name, value]) => [name, typeof value === "number" ? format(value) : String(value)]);
}

function Facts({ run }) {
  const running = run.status === "running";
  const next = run.checkpoints.find((one) => one.next && one.whole);
  const facts = [
    [running ? "step" : "steps", format(run.step ?? 0)],
    ["starts", run.starts.length],
    ...(run.seed === null ? [] : [["seed", String(run.seed)]]),
    ["created", clock(run.created)],
    ["took", duration(run.duration ?? 0)],
    ...(run.facts.config?.name ? [["experiment", String(run.facts.config.name)]] : []),
    ...(run.parent ? [["began from", html`<a href=${link("run", run.parent)}>${run.parent}</a>`]] : []),
    ...settings(run.facts.config),
    ...bests(run).map((best) => [`best ${best.name}`, `${format(best.value)} at step ${format(best.step)}`]),
  ];
  return html`
    <div class="facts">
      <h1 title=${run.name}>${run.name}</h1>
      <${Status} status=${run.status} heartbeat=${run.heartbeat} diverged=${run.diverged} />
      ${run.tags.map((tag) => html`<span class="tag" key=${tag}>${tag}</span>`)}
      <${Pairs} pairs=${facts} />
      <p class="path" title="directory">${run.path}</p>
      <${Share} runs=${[run]} />
      ${RESUMABLE.has(run.status) && next ? html`<p class="soft">Started again, this run resumes from step ${format(next.step)}.</p>` : null}
      ${run.note ? html`<p class="note">${run.note}</p>` : null}
      ${run.reason && run.status !== "finished" && !run.failures.some((one) => one.what === run.reason) ? html`<p class="note">${run.status}: ${run.reason}</p>` : null}
      ${(run.problems ?? []).map((problem) => html`<${Problem} key=${problem} error=${{ message: words(problem) }} />`)}
    </div>
  `;
}

function Timeline({ run }) {
  const box = useRef(null);
  useEffect(() => drawTimeline(box.current, run), [run]);
  return html`
    <section aria-label="Timeline" class="timeline-box">
      <div ref=${box}></div>
      <span class="timeline-save"><${Saves} name="the timeline" file=${`${run.name} timeline`} as=${{ PNG: () => timelinePng(run) }} /></span>
    </section>
  `;
}

function Failures({ run }) {
  const where = (one) => `start ${one.segment}, step ${format(one.step)}${one.rank ? `, rank ${one.rank}` : ""}`;
  return html`
    <details class="failures" open=${run.status === "failed"}>
      <summary class="bad">${count(run.failures.length, "failure")}</summary>
      <table class="list"><tbody>
        ${run.failures.map(
          (one, i) => html`<tr key=${i}>
            <td>${one.kind}</td><td>${where(one)}</td><td>${clock(one.time)}</td>
            <td><details><summary>${one.what}</summary><pre>${one.lines.join("\n")}</pre></details></td>
          </tr>`,
        )}
      </tbody></table>
    </details>
  `;
}

// ------------------------------------------------------------------------------------------- tabs

function Charts({ run, query, changed }) {
  const look = looks(query);
  const shape = JSON.stringify([run.starts, run.rollbacks]);
  const ofRun = useMemo(() => (x) => marks(run, x), [shape]);
  const runs = useMemo(() => [{ id: run.id, label: run.name, slot: 0 }], [run.id, run.name]);
  return html`
    <${ChartBar} look=${look} part=${query.find ?? ""} />
    <${ChartGrid} streams=${run.streams} find=${query.find} runs=${runs} look=${look} marks=${ofRun} changed=${changed} />
  `;
}

function Summaries({ run }) {
  if (!run.summaries.length) return html`<${Empty}>No images or text. <code>loop.add_summary</code> records them, with <code>services.TensorBoard()</code> among the services.<//>`;
  return html`<div class="cards">${run.summaries.map((one) => html`<${Summary} key=${`${one.kind} ${one.name}`} run=${run} one=${one} />`)}</div>`;
}

function Summary({ run, one }) {
  const [at, setAt] = useState(null);
  const place = Math.min(at ?? Infinity, one.steps.length - 1);
  const step = one.steps[place];
  return html`
    <section class="card" aria-label=${one.name}>
      <div class="chart-head"><span class="chart-title" title=${one.name}>${one.name}</span><span class="chart-reading">step ${format(step)}</span></div>
      ${one.kind === "image" ? html`<${Picture} key=${step} address=${summaryAddress(run.id, one, step)} words=${`${one.name} at step ${step}`} />` : html`<${Text} id=${run.id} one=${one} step=${step} />`}
      ${one.steps.length > 1
        ? html`<input type="range" min="0" max=${one.steps.length - 1} value=${place} onInput=${(e) => setAt(Number(e.target.value))} aria-label=${`Step of ${one.name}`} />`
        : null}
    </section>
  `;
}

function Picture({ address, words }) {
  const [gone, setGone] = useState(false);
  return gone
    ? html`<${Problem} error=${{ message: "the picture cannot be read; look for its file in the run's logs/media" }} />`
    : html`<img class="summary" src=${address} alt=${words} onLoad=${enlarge} onError=${() => setGone(true)} />`;
}

function Text({ id, one, step }) {
  const [{ text, error }, set] = useState({ text: "", error: null });
  const box = useRef(null);
  useEffect(() => {
    const stop = new AbortController();
    summaryText(id, one, step, stop.signal)
      .then((text) => set({ text, error: null }))
      .catch((error) => error.name !== "AbortError" && set({ text: "", error }));
    return () => stop.abort();
  }, [id, one.name, step]);
  useEffect(() => box.current?.replaceChildren(one.kind === "histogram" ? histogram(text) : made("pre", "summary", text)), [one.kind, text]);
  return error ? html`<${Problem} error=${error} />` : html`<div ref=${box}></div>`;
}

function Config({ run }) {
  const changed = new Map(run.config_changed.map((each) => [each.name, each.values]));
  const rows = leaves(run.facts.config);
  for (const name of changed.keys()) if (!rows.some(([one]) => one === name)) rows.push([name, undefined]);
  if (!rows.length) return html`<${Empty}>This run has no config.<//>`;
  return html`
    ${run.parent ? html`<p class="soft">Began from <a href=${link("run", run.parent)}>${run.parent}</a>.</p>` : null}
    <table class="list">
      <thead><tr><th>setting</th><th>value</th>${changed.size ? html`<th>in the parent</th>` : null}</tr></thead>
      <tbody>
        ${rows.map(
          ([name, value]) => html`<tr key=${name} class=${changed.has(name) ? "differs" : ""}>
            <th scope="row">${name}</th><td>${changed.has(name) ? html`<span class="mark">≠</span>` : null}${words(value)}</td>
            ${changed.size ? html`<td class="soft">${changed.has(name) ? words(changed.get(name)[1] ?? undefined) : ""}</td>` : null}
          </tr>`,
        )}
      </tbody>
    </table>
  `;
}

const Tree = ({ title, tree }) => html`
  <section><h2>${title}</h2>
    ${leaves(tree).length
      ? html`<table class="list"><tbody>${leaves(tree).map(([name, value]) => html`<tr key=${name}><th scope="row">${name}</th><td>${recorded(name, value)}</td></tr>`)}</tbody></table>`
      : html`<${Empty}>Nothing was recorded.<//>`}
  </section>
`;

const Environment = ({ run }) => html`<div class="two"><${Tree} title="Code" tree=${part(run.facts, CODE)} /><${Tree} title="Machine" tree=${part(run.facts, MACHINE)} /></div>`;

function Checkpoints({ run }) {
  const bestAt = (step) => bests(run).filter((best) => best.step === step).map((best) => best.name).join(", ");
  if (!run.checkpoints.length && !run.best.length && !run.evaluations.length) return html`<${Empty}>No checkpoints.<//>`;
  return html`
    <table class="list">
      <thead><tr><th>checkpoint</th><th>state</th><th class="number">step</th><th class="number">size</th><th>notes</th></tr></thead>
      <tbody>
        ${run.checkpoints.map(
          (one) => html`<tr key=${one.name}>
            <th scope="row">${one.name}</th><td>${one.whole ? "whole" : html`<span class="bad"><${Icon} name="failed" /> damaged: ${one.problem}</span>`}</td>
            <td class="number">${format(one.step)}</td><td class="number">${bytes(one.bytes)}</td>
            <td>${[one.pinned ? "pinned" : "", bestAt(one.step) ? `best ${bestAt(one.step)}` : "", one.next ? "the next start resumes from it" : ""].filter(Boolean).join(", ")}</td>
          </tr>`,
        )}
      </tbody>
    </table>
    ${run.best.length ? html`<${BestWeights} found=${run.best} />` : null}
    ${run.evaluations.length ? html`<${Evaluations} found=${run.evaluations} />` : null}
  `;
}

const BestWeights = ({ found }) => html`
  <section><h2>Best weights</h2>
    <table class="list">
      <thead><tr><th>metric</th><th class="number">rank</th><th class="number">value</th><th class="number">step</th><th>directory</th></tr></thead>
      <tbody>
        ${found.map(
          (one) => html`<tr key=${one.path}>
            <th scope="row">${one.metric}</th><td class="number">${format(one.rank)}</td><td class="number">${format(one.value)}</td>
            <td class="number">${format(one.step)}</td><td class="path">${one.path}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </section>
`;

const Evaluations = ({ found }) => html`
  <section><h2>Evaluations</h2>
    <table class="list">
      <thead><tr><th>stream</th><th>checkpoint</th><th class="number">step</th><th>metrics</th><th>time</th></tr></thead>
      <tbody>
        ${found.map(
          (one, i) => html`<tr key=${i}>
            <th scope="row">${one.stream}</th><td>${one.checkpoint}</td><td class="number">${format(one.step)}</td>
            <td>${Object.entries(one.metrics).map(([name, value]) => `${name} ${format(value)}`).join(", ")}</td><td>${clock(one.time)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </section>
`;

function Log({ run, changed }) {
  const { answer, error } = useAnswer(`${runPath(run.id)}/log`, {}, changed[run.id] ?? 0);
  const box = useRef(null);
  useEffect(() => void (box.current.scrollTop = box.current.scrollHeight), [answer?.text]);
  return html`<${Problem} error=${error} />
    ${answer?.is_cut ? html`<p class="soft">The end of the log.</p>` : null}
    <pre class="log" ref=${box} tabindex="0">${answer?.text || "The log is empty."}</pre>`;
}

const VIEWS = { charts: Charts, summaries: Summaries, config: Config, environment: Environment, checkpoints: Checkpoints, log: Log };
