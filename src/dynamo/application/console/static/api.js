// Calls of the observer, whose page this is, and of its frontends. The key stays in this tab.
const SILENCE_MS = 6000, RETRY_MS = 500, MAX_RETRY_MS = 10000;
const KEYED = ["processes", "workers"]; // of these, changes have single entries
let key = "";

export class Unauthorized extends Error {}
export const setKey = text => { key = text; };
export const headers = () => (key ? {authorization: `Bearer ${key}`} : {});

async function open(path, base, signal) {
  let answer;
  try {
    answer = await fetch(`${base}${path}`, {headers: headers(), cache: "no-store", signal});
  } catch {
    throw new Error(`${base || "the observer"} does not answer`);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) throw new Unauthorized("The deployment does not know this key.");
  const {error: told} = await answer.json().catch(() => ({})); // another server's, in another form
  throw Object.assign(new Error(told ? told.message : `status ${answer.status}`),
    {status: answer.status});
}
export const get = async (path, base = "") => (await open(path, base)).json();

// Yield the events of a stream of server-sent JSON.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = [];
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = value.split("\n");
    rest.push(lines.shift());
    for (const next of lines) {
      const line = rest.join("");
      rest = [next];
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
function merge(state, change) {
  for (const [name, value] of Object.entries(change))
    if (KEYED.includes(name) && state[name])
      for (const [entry, next] of Object.entries(value))
        if (next === null) delete state[name][entry];
        else state[name][entry] = next;
    else state[name] = value;
}
// Follow the deployment while the page is seen: `onState` gets all of it, at once and when some of it has
// changed. Returns what connects again, with another key.
export function follow(onState, fail) {
  let controller = new AbortController(), failures = 0, watch, retry;
  async function run() {
    controller.abort();
    clearTimeout(retry);
    const own = controller = new AbortController(), state = {};
    const hear = () => {
      clearTimeout(watch);
      watch = setTimeout(() => own.abort(), SILENCE_MS);
    };
    hear();
    try {
      for await (const change of events(await open("deployment", "", own.signal))) {
        hear();
        merge(state, change);
        if (own === controller && "at" in state) onState(state);
        failures = 0;
      }
      throw new Error("the observer has ended");
    } catch (error) {
      if (own !== controller || document.hidden) return undefined;
      clearTimeout(watch);
      if (error instanceof Unauthorized) return fail(error);
      const reason = own.signal.aborted ? "the observer does not answer" : error.message;
      fail(new Error(`${reason}; connecting again`));
      retry = setTimeout(run, Math.min(MAX_RETRY_MS, RETRY_MS * 2 ** failures++));
    }
    return undefined;
  }
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) return run();
    clearTimeout(retry);
    return controller.abort();
  });
  run();
  return run;
}
// Run a task now and again after `ms`, while the page is seen. Returns what ends it.
export function repeat(task, ms, fail) {
  let timer, ended = false;
  const run = async () => {
    if (!document.hidden) await Promise.resolve().then(task).catch(fail);
    if (!ended) timer = setTimeout(run, ms);
  };
  run();
  return () => { ended = true; clearTimeout(timer); };
}
// Run a task now, and when requests have ended since, at most every `ms`. Returns what looks at a state.
export function afterRequests(task, ms, fail) {
  let stories = null, ran = -Infinity;
  const run = () => { ran = performance.now(); task().catch(fail); };
  run();
  return state => {
    if (state.stories === stories || performance.now() - ran < ms) return;
    if (stories !== null) run();
    ({stories} = state);
  };
}
const wait = ms => new Promise(done => setTimeout(done, ms));

// The stories of a request. Those of one that has just ended come within seconds.
export async function findStories(name, patience = 12) {
  const id = encodeURIComponent(name);
  for (; patience > 0; patience--) {
    const {requests} = await get(`requests?id=${id}`);
    if (requests.length) return requests;
    await wait(300);
  }
  return (await get(`requests/${id}`)).requests; // or an error that says what is kept
}
