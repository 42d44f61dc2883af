// One worker: its process, its curves, its requests.
import {get, repeat} from "./api.js";
import {age, curve, el, facts, link, share, short, show} from "./dom.js";
import {ratio, shortName, workersOf} from "./overview.js";
import {requestTable} from "./requests.js";
import {follow, seriesOf, spanOf} from "./workers.js";

export const title = "Worker", hidden = true, parent = "workers";
const REQUESTS = 20, REQUESTS_MS = 5000;
const CURVES = [["requests", "requests, running and waiting"], ["used", "share of KV blocks in use", 1],
  ["cached", "share of KV blocks that hold a prefix", 1], ["prompts", "prompt tokens to compute"]];

export function open(body, instance, fail) {
  const parts = {facts: el("div"), curves: el("div"), requests: el("div")};
  body.append(parts.facts, parts.curves, el("h2", {}, "Its newest requests"), parts.requests);
  const update = state => {
    const worker = workersOf(state).find(each => each.instance === instance);
    if (!worker)
      return show(parts.facts, el("p", {class: "bad"}, `${instance} does not serve any more.`));
    const tiers = Object.entries(worker.tiers || {}).map(([name, [blocks, room]]) =>
      `${name} ${share(room ? blocks / room : 0)}`);
    return show(parts.facts, facts([["worker", instance], ["state", worker.state],
      ["model", worker.model], ["engine", worker.engine],
      ["age", worker.age_s ? age(worker.age_s) : ""], ["restarts", `${worker.restarts}`],
      ["reason", worker.reason],
      ["requests", "running" in worker ? `${worker.running} running, ${worker.waiting} waiting` : ""],
      ["prompts", "running" in worker ? `${short(worker.prefill_tokens)} tokens to compute` : ""],
      ["KV blocks", worker.total_blocks ? `${worker.total_blocks}: ${
        share(ratio(worker.active_blocks, worker))} in use, ${
        share(ratio(worker.cached_blocks, worker))} hold a prefix` : ""],
      ["tiers", tiers.join(", ")], ["logs", link("its last lines", "logs", worker.name)]]));
  };
  const draw = timeline => {
    const series = seriesOf(timeline, instance);
    show(parts.curves, ...CURVES.flatMap(([name, text, top]) => [el("h2", {}, `${text}, up to ${
      top ? "100%" : short(Math.max(0, ...series[name]))}`),
      curve(`${text} of ${shortName(instance)}`, series[name], {top, style: "large"})]),
    el("p", {class: "dim"}, spanOf(timeline)));
  };
  const list = async () => {
    const query = new URLSearchParams({worker: instance, limit: REQUESTS});
    show(parts.requests, requestTable((await get(`requests?${query}`)).requests));
  };
  const ends = [repeat(list, REQUESTS_MS, fail), follow(draw, fail)];
  return {update, close: () => ends.forEach(end => end())};
}
