// Elements, and files that a person saves.

import { plain } from "./words.js";

const told = (child) => (typeof child === "string" ? plain(child) : child);

/** An element with a class and children; strings are text, and null is left out. */
export function made(tag, name, ...children) {
  const one = document.createElement(tag);
  if (name) one.className = name;
  one.append(...children.flat().filter((child) => child !== null && child !== undefined).map(told));
  return one;
}

/** An element of a drawing, with its attributes. */
export function drawn(tag, attributes, ...children) {
  const one = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
  one.append(...children);
  return one;
}

/** Show a picture of few pixels larger, each pixel as a square; called when it is loaded. */
export const enlarge = ({ target }) => target.classList.toggle("small", target.naturalWidth < 200);

/** Let the browser save a blob as "NAME.KIND"; the name may have any characters. */
export function save(name, kind, blob) {
  const file = `${name.replaceAll(/[^\w.-]+/g, "-").slice(0, 80)}.${kind}`;
  const address = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: address, download: file }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
