// One worker: its process, its curves, its requests.
import {afterRequests, get} from "./api.js";
import {age, curve, el, facts, link, share, short, show} from "./dom.js";
import {MEASURES, history} from "./history.js";
import {ratio, shortName, workersOf} from "./overview.js";
import {requestTable} from "./requests.js";
import {spanOf} from "./workers.js";

export const title = "Worker", hidden = true, parent = "workers";
const REQUESTS = 20, REQUESTS_MS = 5000, NAMES = Object.keys(MEASURES);

export function open(body, instance, fail) {
  const parts = {facts: el("div"), curves: el("div"), requests: el("div")};
  const seen = history(NAMES, instance, fail);
  body.append(parts.facts, parts.curves, el("h2", {}, "Its newest requests"), parts.requests);
  const list = afterRequests(async () => {
    const query = new URLSearchParams({worker: instance, limit: REQUESTS});
    show(parts.requests, requestTable((await get(`requests?${query}`)).requests));
  }, REQUESTS_MS, fail);
  const update = state => {
    const workers = workersOf(state), worker = workers.find(each => each.instance === instance);
    list(state);
    seen.append(state, workers);
    const drawn = NAMES.filter(name => (seen.series[name] || {})[instance]);
    show(parts.curves, ...drawn.flatMap(name => {
      const {text, top, format} = MEASURES[name], values = seen.series[name][instance];
      return [el("h2", {}, `${text}, up to ${format(top || Math.max(0, ...values))}`),
        curve(`${text} of ${shortName(instance)}`, values, {top, style: "large", at: seen.at})];
    }), el("p", {class: "dim"}, spanOf(seen)));
    if (!worker)
      return show(parts.facts, el("p", {class: "bad"}, `${instance} does not serve.`));
    const known = worker.running !== undefined;
    const tiers = Object.entries(worker.tiers || {}).map(([name, [blocks, room]]) =>
      `${name} ${share(room ? blocks / room : 0)}`);
    return show(parts.facts, facts([["worker", instance], ["state", worker.state],
      ["model", worker.model], ["engine", worker.engine],
      ["age", worker.since ? age(state.at - worker.since) : ""],
      ["restarts", `${worker.restarts || 0}`], ["reason", worker.reason],
      ["requests", known ? `${worker.running} running, ${worker.waiting} waiting` : ""],
      ["prompts", known ? `${short(worker.prefill_tokens)} tokens to compute` : ""],
      ["KV blocks", worker.total_blocks ? `${worker.total_blocks}: ${
        share(ratio(worker.active_blocks, worker))} in use, ${
        share(ratio(worker.cached_blocks, worker))} hold a prefix` : ""],
      ["cache known", worker.view], ["tiers", tiers.join(", ")],
      ["logs", link("its last lines", "logs", worker.name)]]));
  };
  return {update};
}
