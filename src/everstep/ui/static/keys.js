// Keys, and the page of help that `?` opens.

import { html, useEffect, useRef } from "./preact.js";

const writes = (target) => target.closest?.("input:not([type=checkbox]):not([type=range]), textarea, select, [contenteditable]");

/** Keys of a view: {"j": action}.  Keys in a field, or with Ctrl, Alt or Meta, belong to the browser. */
export function useKeys(actions) {
  const now = useRef(actions);
  now.current = actions;
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented) return;
      if (writes(event.target)) {
        if (event.key === "Escape") event.target.blur();
        return;
      }
      if (event.key === "Enter" && event.target.closest("a, button")) return;
      const action = now.current[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

const HELP = [
  ["Everywhere", [["?", "this help"], ["r", "the list of runs"], ["Esc", "leave a field, close this help"]]],
  ["Runs", [["/", "filter"], ["j k", "next, previous run"], ["Enter", "open the run"], ["x", "choose the run"], ["c", "compare the chosen runs"]]],
  ["A run", [["1 – 7", "tabs"], ["/", "find a chart"], ["l", "logarithmic y axis"], ["t", "steps or time"], ["s", "superseded points"], ["0", "whole x axis"], ["[ ]", "less, more smoothing"]]],
  ["A comparison", [["1 – 4", "tabs"], ["d", "only what differs"], ["/ l t s 0 [ ]", "as for a run"]]],
  ["A chart", [["drag", "zoom"], ["double click", "whole x axis"]]],
];

export function Help({ close }) {
  const dialog = useRef(null);
  useEffect(() => {
    dialog.current.showModal();
    addEventListener("hashchange", close);
    return () => removeEventListener("hashchange", close);
  }, []);
  return html`
    <dialog ref=${dialog} class="help" onClose=${close} onClick=${(event) => event.target === dialog.current && close()}>
      <header><h2>Keys</h2><button onClick=${close}>Close</button></header>
      <div class="help-groups">
        ${HELP.map(
          ([title, keys]) => html`<section key=${title}>
            <h3>${title}</h3>
            <dl>${keys.map(([key, meaning]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${meaning}</dd></div>`)}</dl>
          </section>`,
        )}
      </div>
      <p class="soft">The filter takes comparisons: <code>${"valid_loss<0.3 status=finished config.lr>=0.001"}</code></p>
    </dialog>
  `;
}
