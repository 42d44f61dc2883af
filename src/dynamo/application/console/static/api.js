// Calls of the observer, whose page this is, and of its frontends. The key stays in this tab.
const BYTES_PER_MS = 40;
let key = "", received = 0;

export class Unauthorized extends Error {}
export const setKey = text => { key = text; };
export const headers = () => (key ? {authorization: `Bearer ${key}`} : {});

export async function get(path, base = "") {
  let answer;
  try {
    answer = await fetch(`${base}${path}`, {headers: headers(), cache: "no-store"});
  } catch {
    throw new Error(`${base || "the observer"} does not answer`);
  }
  if (answer.status === 401) throw new Unauthorized("The deployment does not know this key.");
  const text = await answer.text();
  received += text.length;
  let body = {};
  try {
    body = JSON.parse(text);
  } catch { /* an error in another form */ }
  if (answer.ok) return body;
  const error = new Error(body.error ? body.error.message : `status ${answer.status}`);
  error.status = answer.status;
  throw error;
}
// Run a task now and again after `ms`, while the page is seen. One that receives much runs less often.
// Returns what ends it.
export function repeat(task, ms, fail) {
  let timer, ended = false;
  const run = async () => {
    const before = received;
    try {
      if (!document.hidden) await task();
    } catch (error) {
      fail(error);
    }
    if (!ended) timer = setTimeout(run, Math.max(ms, (received - before) / BYTES_PER_MS));
  };
  run();
  return () => { ended = true; clearTimeout(timer); };
}
const wait = ms => new Promise(done => setTimeout(done, ms));

// The stories of a request. Those of one that has just ended come within seconds.
export async function findStories(name, patience = 12) {
  for (;;) {
    try {
      return (await get(`requests/${encodeURIComponent(name)}`)).requests;
    } catch (error) {
      if (error.status !== 404 || patience-- <= 0) throw error;
      await wait(300);
    }
  }
}
