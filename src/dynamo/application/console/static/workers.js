// Every worker now and over the last 15 minutes, and how requests were routed to them.
import {age, clock, curve, el, link, share, show, short, table} from "./dom.js";
import {MEASURES, drawMap, history} from "./history.js";
import {busiest, isAway, ratio, tile, workersOf} from "./overview.js";

export const title = "Workers";
const MIN_MAP = 13; // workers; fewer are seen in the table
export const spanOf = ({at}) => (at.length ? `${clock(at[0])} to ${clock(at[at.length - 1])}` : "");

function routingTiles({aggregated_metrics: {throughput, latency, cache_hit: cache, load_balance: balance}}) {
  if (!throughput.requests)
    return el("p", {class: "dim"}, "No request was routed in the last 5 minutes.");
  const shares = [["blocks seen before", "seen"], ["cached anywhere", "reachable"],
    ["cached at the chosen worker", "hit"], ["found by engines", "achieved"]];
  return el("div", {class: "tiles"}, tile("requests", short(throughput.requests)),
    shares.filter(([, name]) => name in cache).map(([text, name]) => tile(text, share(cache[name]))),
    tile("first token, p50", `${latency.ttft_ms_p50.toFixed(0)} ms`),
    tile("first token, p99", `${latency.ttft_ms_p99.toFixed(0)} ms`),
    tile("busiest over mean worker", balance.imbalance.toFixed(2)));
}
const routing = report => [routingTiles(report), report.bottlenecks.map(({evidence, advice}) =>
  el("div", {class: "alert"}, `${evidence}. ${advice}`))];

export function open(body, _, fail) {
  const word = el("input", {type: "search"}), rows = el("div"), report = el("div");
  const choice = el("select", {onchange: () => { seen = history([choice.value], "", fail); draw(); }},
    Object.entries(MEASURES).map(([name, {text}]) => el("option", {value: name}, text)));
  const map = el("canvas", {role: "img", hidden: true}), note = el("p", {class: "dim"});
  let seen = history([choice.value], "", fail), state = null, mapped = [];
  body.append(el("div", {class: "row"}, el("label", {}, "over time", choice),
    el("label", {}, "only names with", word)), note, map, rows,
  el("h2", {}, "Routing of the last 5 minutes"), report);
  const worker = event => mapped[Math.min(mapped.length - 1,
    Math.floor(event.offsetY / map.clientHeight * mapped.length))];
  map.addEventListener("mousemove", event => { map.title = (worker(event) || {name: ""}).name; });
  map.addEventListener("click", event => { location.hash = `worker/${worker(event).instance}`; });
  word.addEventListener("input", () => draw());

  function draw() {
    if (!state) return;
    const name = choice.value, {text, format, top} = MEASURES[name], all = workersOf(state);
    mapped = all.filter(each => each.name.includes(word.value.trim()));
    seen.append(state, all);
    const series = each => (seen.series[name] || {})[each.instance] || [];
    const most = top || mapped.reduce((sum, each) => series(each).reduce(
      (larger, value) => Math.max(larger, value), sum), 1);
    const {rows: shown, note: part} = busiest(mapped);
    note.textContent = `${spanOf(seen)}. All curves have one scale, up to ${format(most)}. ${part}`;
    map.hidden = mapped.length < MIN_MAP || !seen.at.length;
    map.setAttribute("aria-label", `${text} of ${mapped.length} workers, one row each`);
    if (!map.hidden) drawMap(map, seen.at, mapped.map(series), most);
    const columns = [["worker", "name"], ["state"], ["age", "number wide"], ["requests", "number"],
      ["KV in use", "number wide"], ["cached", "number wide"], ["prompts", "number wide"],
      ["cache known", "wide"], ["over time"]];
    show(rows, table("Workers", columns, shown.map(each => {
      const known = each.running !== undefined;
      return [link(each.name, "worker", each.instance),
        el("span", {class: isAway(each) ? "bad" : ""}, each.state || "-"),
        each.since ? age(state.at - each.since) : "-",
        known ? `${each.running} + ${each.waiting}` : "-",
        known ? share(ratio(each.active_blocks, each)) : "-",
        known ? share(ratio(each.cached_blocks, each)) : "-",
        known ? short(each.prefill_tokens) : "-", each.view || "-",
        curve(`${text} of ${each.name}`, series(each), {top: most, at: seen.at})];
    }), word.value ? "no worker has such a name" : "no worker serves"));
    show(report, ...routing(state.routing));
  }
  return {update: next => { state = next; draw(); }};
}
