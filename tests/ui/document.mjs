// As much of a browser's document as the page's scripts use, for Node: no styles, no charts.  The page runs in it against
// a real server:  node document.mjs FOLDER-OF-SCRIPTS ADDRESS COOKIE [HASH WORDS]...  prints the text of each view, as soon as
// it has these words, as a line of JSON.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { runInThisContext } from "node:vm";

const [folder, address, cookie, ...views] = process.argv.slice(2);
const hashes = views.filter((_, at) => at % 2 === 0);
const expected = views.filter((_, at) => at % 2);

class Element extends EventTarget {
  childNodes = [];
  attributes = new Map();
  style = { setProperty: (name, value) => (this.style[name] = value) };
  classList = { add: (name) => (this.className = `${this.className ?? ""} ${name}`), toggle() {} };

  constructor(tag, text = "") {
    super();
    Object.assign(this, { nodeType: tag ? 1 : 3, localName: tag, nodeName: tag, data: text, parentNode: null });
  }
  get parentElement() {
    return this.parentNode;
  }
  get firstChild() {
    return this.childNodes[0] ?? null;
  }
  get nextSibling() {
    return this.parentNode?.childNodes[this.parentNode.childNodes.indexOf(this) + 1] ?? null;
  }
  insertBefore(child, next) {
    child.remove();
    this.childNodes.splice(next ? this.childNodes.indexOf(next) : this.childNodes.length, 0, child);
    child.parentNode = this;
    return child;
  }
  appendChild(child) {
    return this.insertBefore(child, null);
  }
  append(...children) {
    for (const child of children) this.appendChild(child instanceof Element ? child : new Element("", String(child)));
  }
  replaceChildren(...children) {
    for (const child of [...this.childNodes]) child.remove();
    this.append(...children);
  }
  removeChild(child) {
    this.childNodes.splice(this.childNodes.indexOf(child), 1);
    child.parentNode = null;
  }
  remove() {
    this.parentNode?.removeChild(this);
  }
  setAttribute(name, value) {
    this.attributes.set(name, String(value));
  }
  removeAttribute(name) {
    this.attributes.delete(name);
  }
  contains(other) {
    return this === other || this.childNodes.some((child) => child.contains(other));
  }
  get text() {
    return this.data + this.childNodes.map((child) => child.text).join(" ");
  }
}

const root = new Element("div");
const window = new EventTarget();
Object.assign(globalThis, {
  document: {
    hidden: false,
    createElement: (tag) => new Element(tag),
    createElementNS: (_, tag) => new Element(tag),
    createTextNode: (text) => new Element("", text),
    getElementById: (id) => (id === "app" ? root : null),
    querySelector: () => null,
  },
  location: { hash: hashes[0] },
  addEventListener: window.addEventListener.bind(window),
  removeEventListener: window.removeEventListener.bind(window),
  requestAnimationFrame: setImmediate,
  cancelAnimationFrame: clearImmediate,
  IntersectionObserver: class {
    observe() {}
    disconnect() {}
  },
});
const failures = [];
process.on("uncaughtException", (error) => failures.push(String(error.stack)));
const ask = globalThis.fetch;
globalThis.fetch = (path, options) => ask(address + path, { ...options, headers: { ...options?.headers, cookie } });

for (const name of ["preact", "hooks", "htm"]) runInThisContext(readFileSync(`${folder}/vendor/${name}.umd.js`, "utf8"));
await import(pathToFileURL(`${folder}/app.js`));

/** The page's text, as soon as it has these words. */
async function shown(words) {
  while (!root.text.includes(words) && !failures.length) await new Promise((done) => setTimeout(done, 5));
  return root.text;
}

for (const [at, hash] of hashes.entries()) {
  location.hash = hash;
  window.dispatchEvent(new Event("hashchange"));
  console.log(JSON.stringify({ text: await shown(expected[at]), failures }));
}
process.exit(0);
