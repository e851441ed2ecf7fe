// The vendored scripts under the names that our modules use.  They are scripts and not modules, because a
// browser finds "preact" in a module only with an import map in the page, which the page's CSP forbids.

import { plain } from "./words.js";

const { preact, preactHooks, htm } = globalThis;

const readable = (child) => (typeof child === "string" ? plain(child) : Array.isArray(child) ? child.map(readable) : child);

export const html = htm.bind((type, props, ...children) => preact.h(type, props, ...children.map(readable)));
export const render = preact.render;
export const useEffect = preactHooks.useEffect;
export const useMemo = preactHooks.useMemo;
export const useRef = preactHooks.useRef;
export const useState = preactHooks.useState;
