// How lines look: colours that differ for every eye, then dashes.

import { drawn } from "./dom.js";

const PALETTES = {
  light: ["#0068a8", "#c8500a", "#00805a", "#b04a8c", "#946600", "#2787bd", "#7443a3", "#5c646e"],
  dark: ["#5fb2f3", "#ff9256", "#3cc99d", "#ea9fcd", "#e6b64c", "#a3d6f7", "#bd9ff2", "#b7bec7"],
};
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [14, 4]];

export const darkQuery = globalThis.matchMedia?.("(prefers-color-scheme: dark)");

export const isDark = () => Boolean(darkQuery?.matches);

export function colour(slot) {
  return PALETTES[isDark() ? "dark" : "light"][slot % 8];
}

export function dash(slot) {
  return DASHES[Math.floor(slot / 8) % DASHES.length];
}

export function ink() {
  return isDark()
    ? { text: "#a2abb6", strong: "#e8ecf1", line: "#2b3138", back: "#14171b", bad: "#ff8b80" }
    : { text: "#5a636e", strong: "#1b1f24", line: "#e3e7eb", back: "#ffffff", bad: "#b3261e" };
}

export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';

/** A short piece of the line of a series, with its colour and its dash. */
export function swatch(slot) {
  const look = { x1: 0, x2: 22, y1: 4, y2: 4, stroke: colour(slot), "stroke-width": 2.5, "stroke-dasharray": dash(slot).join(" ") };
  return drawn("svg", { class: "swatch", width: 22, height: 8, "aria-hidden": "true" }, drawn("line", look));
}
