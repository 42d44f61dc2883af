// The newest requests that match a form.
import {afterRequests, get} from "./api.js";
import {clock, el, link, seconds, show, table} from "./dom.js";
import {shortName} from "./overview.js";

export const title = "Requests";
const UPDATE_MS = 3000, LIMIT = 50;

const COLUMNS = [["at"], ["took", "number"], ["first token", "number wide"],
  ["tokens in, cached, out", "number wide"], ["request", "name"], ["end"], ["worker", "name wide"],
  ["why", "text"]];
export const requestTable = stories => table("Requests", COLUMNS, stories.map(story => [
  clock(story.at), seconds(story.seconds), seconds(story.ttft),
  `${story.prompt_tokens}, ${story.cached_tokens}, ${story.output_tokens}`,
  link(story.client_id.slice(0, 24), "request", story.request_id),
  el("span", {class: story.end ? "bad" : ""}, story.end || "ok"),
  story.attempts.map(({worker}) => shortName(worker)).join(" > "), story.verdict]),
"no such request is kept");

export function open(body, _, fail) {
  const slow = el("input", {type: "number", min: 0, step: "any", value: 0, size: 5});
  const worker = el("input", {type: "text", size: 14, placeholder: "all"});
  const failed = el("input", {type: "checkbox"}), name = el("input", {type: "text", size: 30});
  const rows = el("div");
  const update = async () => {
    const query = new URLSearchParams({slow: slow.value || 0, failed: failed.checked ? 1 : 0,
      worker: worker.value.trim(), limit: LIMIT});
    show(rows, requestTable((await get(`requests?${query}`)).requests));
  };
  const again = () => update().catch(fail);
  const filter = el("form", {class: "row", onsubmit: event => { event.preventDefault(); again(); },
    onchange: again}, el("label", {}, "took at least, s", slow), el("label", {}, "worker", worker),
  el("label", {class: "check"}, failed, "failed only"), el("button", {}, "Filter"));
  const find = el("form", {class: "row", onsubmit: event => {
    event.preventDefault();
    if (name.value.trim()) location.hash = `request/${encodeURIComponent(name.value.trim())}`;
  }}, el("label", {}, "request id or trace id", name), el("button", {}, "Find"));
  body.append(filter, find, rows);
  return {update: afterRequests(update, UPDATE_MS, fail)};
}
