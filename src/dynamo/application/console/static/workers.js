// Every worker over the last 15 minutes: the samples of the observer.
import {get, repeat} from "./api.js";
import {age, clock, curve, el, link, share, show, table} from "./dom.js";
import {busiest, isAway, ratio, workersOf} from "./overview.js";

export const title = "Workers";
const UPDATE_MS = 2000, UPDATES_PER_RELOAD = 60;
const FIELDS = ["running", "waiting", "prefill_tokens", "active_blocks", "cached_blocks",
  "total_blocks"];

// A column is a number while its value does not change. In a list, null means: not known then.
const expand = (column, count) => (Array.isArray(column) ? column : Array(count).fill(column));
function join(older, newer) {
  const workers = {};
  for (const name of Object.keys({...older.workers, ...newer.workers})) {
    const before = older.workers[name], after = newer.workers[name];
    workers[name] = Object.fromEntries(FIELDS.map(field => [field,
      expand(before ? before[field] : null, older.at.length).concat(
        expand(after ? after[field] : null, newer.at.length))]));
  }
  return {at: older.at.concat(newer.at), workers};
}
// Follow the samples: `onChange` gets the timeline. Returns what ends it.
export function follow(onChange, fail) {
  let timeline = {at: [], workers: {}}, updates = 0;
  return repeat(async () => {
    if (updates++ % UPDATES_PER_RELOAD === 0) timeline = {at: [], workers: {}};
    const since = timeline.at[timeline.at.length - 1] || 0;
    timeline = join(timeline, await get(`router/timeline?since=${since}`));
    onChange(timeline);
  }, UPDATE_MS, fail);
}
// The series of a worker, a value for each sample. Older samples are further apart.
export function seriesOf(timeline, instance) {
  const columns = timeline.workers[instance];
  const known = (...names) => timeline.at.map((_, at) =>
    (names.every(name => columns && columns[name][at] !== null)
      ? names.map(name => columns[name][at]) : null));
  const map = (values, change) => values.map(value => (value === null ? null : change(...value)));
  const part = (blocks, all) => (all ? blocks / all : 0);
  return {
    requests: map(known("running", "waiting"), (running, waiting) => running + waiting),
    prompts: map(known("prefill_tokens"), tokens => tokens),
    used: map(known("active_blocks", "total_blocks"), part),
    cached: map(known("cached_blocks", "total_blocks"), part),
  };
}
export const spanOf = ({at}) => (at.length ? `${clock(at[0])} to ${clock(at[at.length - 1])}` : "");

export function open(body, _, fail) {
  let timeline = {at: [], workers: {}};
  const rows = el("div"), word = el("input", {type: "search"});
  body.append(el("div", {class: "row"}, el("label", {}, "only names with", word)), rows);
  const columns = [["worker", "name"], ["state"], ["age", "number wide"], ["restarts", "number wide"],
    ["requests", "number"], ["over time"], ["KV in use", "number"], ["over time"],
    ["cached", "number wide"], ["over time", "wide"]];
  const update = state => {
    const {rows: workers, note} = busiest(workersOf(state).filter(({name}) =>
      name.includes(word.value.trim())));
    const series = workers.map(({instance}) => seriesOf(timeline, instance));
    const most = Math.max(1, ...series.flatMap(({requests}) => requests));
    show(rows, el("p", {class: "dim"}, `${spanOf(timeline)}. Curves of requests have one scale. ${note}`),
      table("Workers", columns, workers.map((worker, at) => [
        link(worker.name, "worker", worker.instance),
        el("span", {class: isAway(worker) ? "bad" : ""}, worker.state || "-"),
        worker.age_s ? age(worker.age_s) : "-", `${worker.restarts}`,
        "running" in worker ? `${worker.running} + ${worker.waiting}` : "-",
        curve(`requests of ${worker.name}`, series[at].requests, {top: most}),
        share(ratio(worker.active_blocks || 0, worker)),
        curve(`share of KV blocks in use at ${worker.name}`, series[at].used, {top: 1}),
        share(ratio(worker.cached_blocks || 0, worker)),
        curve(`share of KV blocks cached at ${worker.name}`, series[at].cached, {top: 1})]),
      "no worker serves"));
  };
  return {update, close: follow(next => { timeline = next; }, fail)};
}
