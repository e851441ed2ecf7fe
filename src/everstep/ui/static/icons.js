// ICONS: name -> path in a box of 16 by 16.  Each state has a shape of its own; colour only repeats it.

import { drawn } from "./dom.js";

export const ICONS = {
  running: "M5 3.5 L12.5 8 L5 12.5 Z",
  finished: "M3 8.5 L6.5 12 L13 4.5",
  stopped: "M5 3.5 V12.5 M11 3.5 V12.5",
  killed: "M4 4 L12 12 M12 4 L4 12",
  failed: "M8 2.5 V9.5 M8 12.3 V13.3",
  error: "M8 2.5 V9.5 M8 12.3 V13.3",
  gone: "M3 8 H5 M7 8 H9 M11 8 H13",
  verified: "M2.5 8.5 L5.5 11.5 L9 7.5 M8 11.5 L13.5 4.5",
  "not verified": "M5 6 A3 3 0 1 1 8 9 V10.2 M8 12.6 V13.4",
  diverged: "M3 6 H13 M3 10 H13 M5.5 13.5 L10.5 2.5",
  "nothing to verify": "M4 8 H12",
  first: "M8 8 m-2.5 0 a2.5 2.5 0 1 0 5 0 a2.5 2.5 0 1 0 -5 0",
  "rolled back": "M13 12 C13 7 10 6 4 6 M7 3 L4 6 L7 9",
};
export const FILLED = new Set(["running", "first"]);

export function icon(name) {
  const path = drawn("path", { d: ICONS[name] ?? ICONS.gone });
  return drawn("svg", { viewBox: "0 0 16 16", class: `icon${FILLED.has(name) ? " icon-filled" : ""}`, "aria-hidden": "true" }, path);
}
