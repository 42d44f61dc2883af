// Calls of the observer, whose page this is, and of its frontends. The key stays in this tab.
let key = "";

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
  const body = await answer.json().catch(() => ({}));
  if (answer.ok) return body;
  const error = new Error(body.error ? body.error.message : `status ${answer.status}`);
  error.status = answer.status;
  throw error;
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
