// Questions to the server.  An answer that is not good is an Error with the server's words.

/** Ask; a parameter whose value is a list is given once for each of its elements. */
export async function get(path, params = {}, signal = undefined) {
  const each = Object.entries(params).flatMap(([name, value]) => [value].flat().map((one) => [name, one]));
  const given = each.filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  const address = query ? `${path}?${query}` : path;
  let answer;
  try {
    answer = await fetch(address, { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer; start everstep ui again");
  }
  if (answer.status === 401) throw new Error("this browser has no session; open the link that everstep ui printed");
  const content = await answer.json().catch((error) => {
    if (error.name === "AbortError") throw error; // after the head of the answer: what was read of its body is no answer
    throw new Error(`the server's answer cannot be read (${answer.status})`);
  });
  if (!answer.ok) throw new Error(content.error ?? `the server answered ${answer.status}`);
  return content;
}

export const runPath = (id) => `/api/runs/${encodeURIComponent(id)}`;

let tell = () => {};

/** Be told true or false: whether the server is heard.  The page has one who asks. */
export function onHeard(told) {
  tell = told;
  return () => (tell = () => {});
}

/**
 * Listen to what changes.  `changed` gets the ids of runs that changed in the list, `points` {run, step}; `back` is
 * called when the page was hidden and is seen again.  Returns a function that ends it.
 *
 * A hidden page does not listen: browsers allow six connections to a server, for all tabs together.
 */
export function listen(runs, { changed, points, back }) {
  let source = null;
  const open = () => {
    source = new EventSource(`/api/live?runs=${runs.map(encodeURIComponent).join(",")}`);
    source.addEventListener("runs", (event) => changed?.(JSON.parse(event.data).changed));
    source.addEventListener("points", (event) => points?.(JSON.parse(event.data)));
    source.onopen = () => tell(true);
    source.onerror = () => tell(false);
  };
  const seen = () => {
    source?.close();
    source = null;
    if (document.hidden) return;
    open();
    back?.();
  };
  if (!document.hidden) open();
  document.addEventListener("visibilitychange", seen);
  return () => {
    document.removeEventListener("visibilitychange", seen);
    source?.close();
  };
}

/** Call `action` at most once in `wait` milliseconds, and once more after the last call. */
export function calmly(action, wait) {
  let timer = null;
  let again = false;
  const tick = () => {
    timer = null;
    if (again) run();
  };
  const run = () => {
    again = false;
    timer = setTimeout(tick, wait);
    action();
  };
  const call = () => (timer === null ? run() : (again = true));
  call.stop = () => (clearTimeout(timer), (timer = null), (again = false));
  return call;
}
