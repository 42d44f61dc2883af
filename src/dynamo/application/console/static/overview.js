// What the deployment does now: pace, promise, alerts, workers, causes.
import {bar, clock, curve, el, link, seconds, share, short, show, table} from "./dom.js";

export const title = "Overview";
const MOST = 12, CHOSEN_MS = 10000;

const sum = values => values.reduce((total, value) => total + value, 0);
const last = values => values.findLast(value => value !== null);
const byName = new Intl.Collator(undefined, {numeric: true});
export const shortName = instance => instance.replace(/-[0-9a-f]{10}$/, "");

// The workers with what their process and their last load report tell.
const ROW = ["running", "waiting", "prefill_tokens", "active_blocks", "cached_blocks", "total_blocks",
  "routed", "view", "tiers"];
export function workersOf({processes, workers: rows}) {
  const workers = new Map();
  for (const [instance, row] of Object.entries(rows)) {
    const worker = {instance, name: shortName(instance), state: ""};
    ROW.forEach((name, at) => { worker[name] = row[at]; });
    workers.set(instance, worker);
  }
  for (const [instance, process] of Object.entries(processes))
    if (process.role === "worker")
      workers.set(instance, {...workers.get(instance), ...process, instance});
  return [...workers.values()].sort((one, other) => byName.compare(one.name, other.name));
}
// So many rows are drawn: the workers that are not ready and the busiest first, then by name. The choice holds
// for a while, so that rows do not jump.
let chosen = new Set(), chosenAt = -Infinity;
export function busiest(workers, most = 50) {
  if (workers.length <= most) return {rows: workers, note: ""};
  const isStale = performance.now() - chosenAt > CHOSEN_MS;
  if (isStale || workers.filter(each => chosen.has(each.instance)).length !== most) {
    const rank = each => (isAway(each) ? Infinity : (each.running || 0) + (each.waiting || 0));
    chosen = new Set([...workers].sort((one, other) => rank(other) - rank(one) || 0).slice(0, most)
      .map(({instance}) => instance));
    chosenAt = performance.now();
  }
  return {rows: workers.filter(each => chosen.has(each.instance) || isAway(each)), note: `${most} of ${
    workers.length} workers: those that are not ready and the busiest`};
}
export const isAway = ({state}) => !["", "ready", "starting"].includes(state);
export const ratio = (blocks, worker) => (worker.total_blocks ? blocks / worker.total_blocks : 0);

export const tile = (name, value, graph) =>
  el("div", {class: "tile"}, el("span", {class: "dim"}, name), el("b", {}, value), graph);

function tiles(state) {
  const {pace} = state, workers = Object.values(state.workers);
  const rate = values => short(sum(values.slice(-10)) / 10);
  return [
    tile("requests a second", rate(pace.requests), curve("requests a second", pace.requests)),
    tile("tokens a second", rate(pace.tokens), curve("tokens a second", pace.tokens)),
    tile("first token, median", seconds(last(pace.ttft)), curve("median in s", pace.ttft)),
    tile("first token, p95", seconds(last(pace.ttft_p95)), curve("p95 in s", pace.ttft_p95)),
    tile("longest gap", seconds(last(pace.gap)), curve("longest gap in s", pace.gap)),
    tile("failed in a minute", `${sum(pace.failed)}`, curve("failed", pace.failed)),
    tile("running", `${sum(workers.map(([running]) => running))}`),
    tile("waiting", `${state.waiting + sum(workers.map(([, waiting]) => waiting))}`),
  ];
}
const alertLine = ({name, about, message}) =>
  el("div", {class: "alert"}, el("b", {}, `${name} ${about || ""}`.trim()), `: ${message || ""}`);

function workerTable(state) {
  const columns = [["worker", "name"], ["state"], ["requests", "number"], ["KV in use"],
    ["cached", "wide"], ["model", "wide cut"]];
  const {rows, note} = busiest(workersOf(state), MOST);
  return [table("Workers", columns, rows.map(worker => {
    const used = ratio(worker.active_blocks || 0, worker), known = worker.running !== undefined;
    return [link(worker.name, "worker", worker.instance),
      el("span", {class: isAway(worker) ? "bad" : ""}, worker.state || "-"),
      known ? `${worker.running} + ${worker.waiting}` : "-",
      known ? bar(`${share(used)} of the KV blocks`, 0, used) : "-",
      known ? share(ratio(worker.cached_blocks, worker)) : "-", worker.model || ""];
  }), "no worker serves"), el("p", {class: "dim"}, note)];
}
export function slowTable(rows) {
  const columns = [["at"], ["took", "number"], ["request", "name"], ["end"], ["why", "text"]];
  return table("Slow requests", columns, rows.map(row => [clock(row.at), seconds(row.seconds),
    link(row.client_id.slice(0, 24), "request", row.request_id),
    el("span", {class: row.end ? "bad" : ""}, row.end || "ok"), row.verdict]),
  "no request ended in the last 5 minutes");
}
function sloTable(slo) {
  if (slo.reason) return el("p", {class: "bad"}, slo.reason);
  const columns = [["window"], ["requests", "number"], ["good", "number"], ["failed", "number wide"],
    ["late", "number wide"], ["budget left", "number"]];
  const percent = value => (value === null ? "-" : `${(value * 100).toFixed(2)}%`);
  return [el("p", {class: "dim"}, `Promised: ${percent(slo.target)} of requests end well, with a ` +
    `first token within ${seconds(slo.ttft_slo)} and no gap over ${seconds(slo.gap_slo)}.`),
  table("Promise", columns, slo.windows.map(each => [each.window, `${each.requests}`,
    percent(each.good_ratio), `${each.failed}`, `${each.late}`,
    el("span", {class: each.budget_left < 0 ? "bad" : ""}, percent(each.budget_left))]))];
}
const causeTable = causes => table("Causes", [["requests", "number"], ["cost", "number"], ["cause"],
  ["workers", "wide"], ["worst", "name"]], causes.map(group => [`${group.requests}`,
  group.seconds ? `${group.seconds.toFixed(1)} s` : "-", group.cause,
  Object.keys(group.workers).map(shortName).slice(0, 4).join(", "),
  link(group.worst.client_id.slice(0, 24), "request", group.worst.request_id)]),
"nothing took longer than usual");

export function open(body) {
  const parts = Object.fromEntries(["pace", "alerts", "slow", "slo", "causes", "workers"].map(
    name => [name, el("div")]));
  parts.pace.className = "tiles";
  body.append(parts.pace, parts.alerts, el("h2", {}, "Workers"), parts.workers,
    el("h2", {}, "Promise"), parts.slo, el("h2", {}, "Why requests were late in the last hour"),
    parts.causes, el("h2", {}, "Slow and failed requests of the last 5 minutes"), parts.slow);
  return {
    update: state => {
      show(parts.pace, ...tiles(state));
      show(parts.alerts, ...state.alerts.map(alertLine));
      show(parts.workers, workerTable(state));
      show(parts.slo, sloTable(state.slo));
      show(parts.causes, causeTable(state.causes));
      show(parts.slow, slowTable(state.slow));
    },
  };
}
