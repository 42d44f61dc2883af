// One request: verdict, timeline, attempts, candidates. The data are those of `dynamo why`.
import {findStories, get} from "./api.js";
import {bar, clock, el, facts, link, seconds, short, show, table} from "./dom.js";
import {shortName} from "./overview.js";

export const title = "Request", hidden = true, parent = "requests";

export function timeline(story) {
  const whole = Math.max(story.seconds, 1e-9);
  return table("Stages", [["stage"], ["took", "number"], ["when"], ["worker", "name"]],
    story.stages.map(({stage, at, seconds: took, worker}) => [stage, seconds(took),
      bar(`${stage}: ${seconds(took)} after ${seconds(at)}`, at / whole, (at + took) / whole),
      worker ? link(shortName(worker), "worker", worker) : ""]), "no stages are known");
}
function attemptFacts(attempt, number) {
  const {times} = attempt, predicted = attempt.predicted_ttft;
  const first = attempt.first_token === null ? "none" : seconds(attempt.first_token - attempt.at);
  return el("section", {}, el("h2", {}, `Attempt ${number + 1}: ${shortName(attempt.worker)}`), facts([
    ["worker", link(attempt.worker, "worker", attempt.worker)],
    ["prompt by", attempt.prefill_worker],
    ["sent after", seconds(attempt.at)],
    ["first token", `${first}${predicted === null ? "" : `, predicted ${seconds(predicted)}`}`],
    ["prompt", `${attempt.prompt_tokens} tokens, ${attempt.cached_tokens} cached`],
    ["behind", times.ahead_requests > 0 ? `${times.ahead_requests} requests with ` +
      `${times.ahead_tokens} prompt tokens to compute` : ""],
    ["KV from", times.kv_from ? `${times.kv_from}, waited ${seconds(times.kv_s)}` : ""],
    ["preempted", times.preemptions > 0 ? `${times.preemptions} times, ` +
      `${times.recomputed_tokens} tokens computed again` : ""],
    ["went on at", attempt.resumed_tokens ? `token ${attempt.resumed_tokens}` : ""],
    ["ended with", attempt.error ? `${attempt.error}: ${attempt.reason}` : ""],
    ["times", Object.keys(times).length ? "" : "its engine does not tell them"]]));
}
function candidates(decision) {
  const terms = [...new Set(decision.costs.flatMap(({terms: each}) => Object.keys(each)))];
  const columns = [["worker", "name"], ["cost", "number"], ["blocks held", "number"],
    ...terms.map(term => [term, "number wide"])];
  return el("section", {}, el("h2", {}, `Candidates, mode ${decision.mode}`),
    el("p", {}, decision.why), table("Candidates", columns, decision.costs.map(row => [
      `${shortName(row.worker)}${row.worker === decision.worker ? " (chosen)" : ""}`,
      short(row.cost), `${row.overlap_blocks}`,
      ...terms.map(term => (term in row.terms ? short(row.terms[term]) : ""))]),
    "the costs are not kept"));
}
function page(story, decisions) {
  const own = story.request_id === story.client_id ? "" : ` (${story.request_id})`;
  return [el("p", {class: story.end ? "bad" : ""}, el("b", {}, story.verdict)), facts([
    ["request", `${story.client_id}${own}`], ["path", story.path], ["model", story.model],
    ["at", `${clock(story.at)} at ${story.process}`],
    ["took", `${seconds(story.seconds)}, ${story.end || "ended well"}`],
    ["first text", story.ttft === null ? "" : seconds(story.ttft)],
    ["longest gap", seconds(story.longest_gap)],
    ["tokens", `${story.prompt_tokens} of the prompt, ${story.cached_tokens} cached, ` +
      `${story.output_tokens} of the answer`],
    ["not cached", story.missed], ["trace", story.trace_id],
    ["JSON", el("a", {href: `requests/${encodeURIComponent(story.request_id)}`}, "as dynamo why")]]),
  el("h2", {}, "Timeline"), timeline(story), ...story.attempts.map(attemptFacts),
  ...decisions.map(candidates)];
}
export function open(body, name, fail) {
  show(body, el("p", {class: "dim"}, "..."));
  (async () => {
    try {
      const stories = await findStories(name);
      const found = await get(`router/explain/${encodeURIComponent(stories[0].request_id)}`).catch(
        () => ({decisions: []}));
      show(body, ...stories.flatMap((story, at) => page(story, at ? [] : found.decisions)));
    } catch (error) {
      show(body, el("p", {class: "bad"}, error.message));
      fail(error);
    }
  })();
}
