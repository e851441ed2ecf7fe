// Small parts that several views use.

import { html, useEffect, useRef, useState } from "./preact.js";
import { report } from "./api.js";
import { save } from "./dom.js";
import { FILLED, ICONS } from "./icons.js";
import { colour, dash } from "./looks.js";
import { clock, commandLine, duration, format, words } from "./words.js";

const MOST_SHARED = 20; // runs in a report

export const Icon = ({ name }) => html`
  <svg class=${`icon ${FILLED.has(name) ? "icon-filled" : ""}`} viewBox="0 0 16 16" aria-hidden="true">
    <path d=${ICONS[name] ?? ICONS.gone} />
  </svg>
`;

export const ago = (seconds) => (seconds < 1.5 ? "now" : `${duration(Math.round(seconds))} ago`);

/** Status by shape and word; a running run tells when it was last heard, a diverged one from which step on. */
export function Status({ status, heartbeat, diverged }) {
  const silent = status === "running" && heartbeat !== null && heartbeat > 120;
  return html`<span class=${`status status-${status}`}>
    <${Icon} name=${status} />${status}
    ${status === "running" && heartbeat !== null && heartbeat !== undefined
      ? html`<small class=${silent ? "warn" : "soft"}>${silent ? "silent, " : ""}${ago(heartbeat)}</small>`
      : null}
    ${diverged === null || diverged === undefined ? null : html`<small class="bad"><${Icon} name="diverged" /> diverged at ${format(diverged)}</small>`}
  </span>`;
}

export const Swatch = ({ slot }) => html`
  <svg class="swatch" width="22" height="8" aria-hidden="true">
    <line x1="0" x2="22" y1="4" y2="4" stroke=${colour(slot)} stroke-width="2.5" stroke-dasharray=${dash(slot).join(" ")} />
  </svg>
`;

export const Problem = ({ error }) => (error ? html`<p class="problem" role="alert"><${Icon} name="error" />${error.message}</p>` : null);

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

/** A cell of the list of runs. */
export function cell(value, kind) {
  if (value === null || value === undefined) return "";
  if (kind === "time") return clock(value).slice(0, 16);
  if (kind === "duration") return duration(value);
  return kind === "number" ? format(value) : words(value).replaceAll("\n", ", ");
}

/** {"a": {"b": 1}} as [["a.b", 1]]. */
export function leaves(tree, prefix = "") {
  if (tree === null || typeof tree !== "object" || Array.isArray(tree)) return prefix ? [[prefix.slice(0, -1), tree]] : [];
  const found = Object.entries(tree).flatMap(([name, value]) => leaves(value, `${prefix}${name}.`));
  return found.length || !prefix ? found : [[prefix.slice(0, -1), {}]];
}

/** Buttons that save a drawing: {PNG: () => a promise of a blob, CSV: ...}, under the name of what is drawn. */
export const Saves = ({ name, file, as, disabled }) =>
  Object.entries(as).map(
    ([kind, make]) => html`<button key=${kind} disabled=${disabled} title=${`Save ${name} as ${kind}`} onClick=${async () => save(file ?? name, kind.toLowerCase(), await make())}>${kind}</button>`,
  );

/** Whether an element has come near the visible part of the page. */
export function useSeen() {
  const ref = useRef(null);
  const [seen, setSeen] = useState(false);
  useEffect(() => {
    const watch = new IntersectionObserver(([entry]) => setSeen(entry.isIntersecting), { rootMargin: "300px" });
    watch.observe(ref.current);
    return () => watch.disconnect();
  }, []);
  return [ref, seen];
}

/** Tabs whose choice is in the address. */
export const Tabs = ({ names, chosen, choose }) => html`
  <nav class="tabs" role="tablist">
    ${names.map(
      ([name, title]) =>
        html`<button role="tab" key=${name} aria-selected=${name === chosen} onClick=${() => choose(name)}>${title}</button>`,
    )}
  </nav>
`;

/** How to give these runs to somebody who cannot open this page. */
export function Share({ runs }) {
  const [copied, setCopied] = useState("");
  if (report || runs.length > MOST_SHARED) return null;
  const command = `everstep report ${commandLine(runs.map((run) => run.path))} -o report.html`;
  const copy = (what, text) => navigator.clipboard.writeText(text).then(() => setCopied(what), () => setCopied(""));
  return html`
    <details class="share">
      <summary>Share</summary>
      <p>This command writes one HTML file with charts, timeline, settings and log, which opens without a server:</p>
      <pre>${command}</pre>
      <p><button onClick=${() => copy("command", command)}>Copy command</button> <button onClick=${() => copy("link", location.href)}>Copy link</button>
      <span class="soft" role="status">${copied ? ` The ${copied} is copied.` : " The link is for whoever can open this page."}</span></p>
    </details>
  `;
}

/** Names and values in two columns. */
export const Pairs = ({ pairs }) => html`
  <dl class="pairs">${pairs.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
`;
