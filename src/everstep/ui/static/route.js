// The view is in the address: #/runs?where=loss<1, #/run/ID?tab=config, #/compare?runs=A,B.  A copied link shows the same.

import { useEffect, useState } from "./preact.js";

export function parse(hash = location.hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/");
  return { view: view || "runs", id: decoded(rest.join("/")), query: Object.fromEntries(new URLSearchParams(query)) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a link that was cut: no run has this id, and the page says so
  }
}

export function link(view, id = "", query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "" && value !== false);
  const words = new URLSearchParams(given).toString();
  return `#/${view}${id ? `/${encodeURIComponent(id)}` : ""}${words ? `?${words}` : ""}`;
}

/** Change some of the query; the browser's way back skips changes with `quiet`. */
export function setQuery(patch, quiet = true) {
  const { view, id, query } = parse();
  const target = link(view, id, { ...query, ...patch });
  if (target === location.hash) return;
  if (quiet) {
    history.replaceState(null, "", target);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = target;
}

export function useRoute() {
  const [route, setRoute] = useState(parse);
  useEffect(() => {
    const changed = () => setRoute(parse());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}
