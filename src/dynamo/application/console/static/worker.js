// One worker: its process, its curves, its requests.
import {afterRequests, get} from "./api.js";
import {age, clock, curve, el, facts, link, share, short, show} from "./dom.js";
import {MEASURES, history} from "./history.js";
import {ratio, shortName, workersOf} from "./overview.js";
import {requestTable} from "./requests.js";
import {spanOf} from "./workers.js";

export const title = "Worker", hidden = true, parent = "workers";
const REQUESTS = 20, REQUESTS_MS = 5000, NAMES = Object.keys(MEASURES);

// Return the index of the time that is nearest to one.
const nearest = (times, wanted) => times.reduce((best, time, index) =>
  (Math.abs(time - wanted) < Math.abs(times[best] - wanted) ? index : best), 0);

export function open(body, instance, fail) {
  const parts = {facts: el("div"), curves: el("div"), requests: el("div")};
  const seen = history(NAMES, instance, fail), time = el("input", {type: "range", min: 0});
  let chosen = Infinity; // the time that is shown; this one: the newest
  body.append(parts.facts, el("label", {class: "long"}, "show the values at", time), parts.curves,
    el("h2", {}, "Its newest requests"), parts.requests);
  const list = afterRequests(async () => {
    const query = new URLSearchParams({worker: instance, limit: REQUESTS});
    show(parts.requests, requestTable((await get(`requests?${query}`)).requests));
  }, REQUESTS_MS, fail);
  const drawCurves = () => {
    const {at} = seen, drawn = NAMES.filter(name => (seen.series[name] || {})[instance]);
    const mark = nearest(at, Math.min(chosen, at[at.length - 1]));
    time.max = Math.max(0, at.length - 1);
    time.value = mark;
    if (at.length) time.setAttribute("aria-valuetext", clock(at[mark]));
    show(parts.curves, ...drawn.flatMap(name => {
      const {text, top, format} = MEASURES[name], values = seen.series[name][instance];
      const value = values[mark] === null ? "not known" : format(values[mark]);
      return [el("h2", {}, `${text}: ${value} `, el("small", {class: "dim"}, `at ${clock(at[mark])}, up to ${
        format(top || Math.max(0, ...values))}`)),
      curve(`${text} of ${shortName(instance)}`, values, {top, style: "large", at, mark})];
    }), el("p", {class: "dim"}, spanOf(seen)));
  };
  const choose = index => {
    chosen = index < seen.at.length - 1 ? seen.at[index] : Infinity;
    drawCurves();
  };
  time.addEventListener("input", () => choose(Number(time.value)));
  for (const kind of ["pointerdown", "pointermove"])
    parts.curves.addEventListener(kind, ({target, clientX}) => {
      const svg = target.closest("svg.large"), {at} = seen;
      if (!svg) return;
      const {left, width} = svg.getBoundingClientRect();
      choose(nearest(at, at[0] + (clientX - left) / width * (at[at.length - 1] - at[0])));
    });
  parts.curves.addEventListener("pointerleave", event => {
    if (event.pointerType === "mouse") choose(Infinity); // what a finger has chosen stays
  });
  const update = state => {
    const workers = workersOf(state), worker = workers.find(each => each.instance === instance);
    list(state);
    seen.append(state, workers);
    drawCurves();
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
