// The frame of the console: pages by the part of the URL after #, and what changes in the deployment.
import {Unauthorized, follow, setKey} from "./api.js";
import {el, show} from "./dom.js";
import * as logs from "./logs.js";
import * as overview from "./overview.js";
import * as playground from "./playground.js";
import * as request from "./request.js";
import * as requests from "./requests.js";
import * as settings from "./settings.js";
import * as worker from "./worker.js";
import * as workers from "./workers.js";

const PAGES = {overview, workers, worker, requests, request, playground, logs, settings};
const at = id => document.getElementById(id);
let page = {}, name = "", state = null, opened = 0;

function route() {
  const [wanted, ...rest] = location.hash.slice(1).split("/");
  if (wanted === "main" && opened) return at("main").focus();
  name = wanted in PAGES ? wanted : "overview";
  let argument = rest.join("/");
  try {
    argument = decodeURIComponent(argument);
  } catch { /* as it is */ }
  if (page.close) page.close();
  const module = PAGES[name], title = el("h1", {tabindex: -1}, module.title);
  const body = el("div"), turn = ++opened;
  at("main").replaceChildren(title, body);
  document.title = `${module.title} - Dynamo`;
  show(at("pages"), ...Object.entries(PAGES).filter(([, {hidden}]) => !hidden).map(
    ([key, {title: text}]) => el("a", {href: `#${key}`,
      "aria-current": key === (module.parent || name) ? "page" : undefined}, text)));
  page = module.open(body, argument, error => turn === opened && fail(error)) || {};
  if (state && page.update) page.update(state);
  if (turn > 1) title.focus();
  return undefined;
}
function ask(error) {
  if (at("ask").open) return;
  at("refusal").textContent = at("key").value ? error.message : "";
  at("ask").showModal();
}
const count = ({length}, word, plural = "s") => `${length} ${word}${length === 1 ? "" : plural}`;
function update(next) {
  state = next;
  const {alerts, processes, deployment} = state;
  const away = Object.values(processes).filter(each => each.state !== "ready" && each.state !== "starting");
  at("deployment").textContent = deployment;
  const problems = [alerts.length && count(alerts, "alert"),
    away.length && `${count(away, "process", "es")} not ready`].filter(Boolean);
  show(at("health"), problems.length ? el("span", {class: "bad"}, problems.join(", "))
    : el("span", {class: "good"}, "all processes ready, no alerts"));
  if (page.update) page.update(state);
}
function fail(error) {
  if (error instanceof Unauthorized) ask(error);
  else show(at("health"), el("span", {class: "bad"}, `not current: ${error.message}`));
}
at("key-form").addEventListener("submit", () => {
  setKey(at("key").value.trim());
  setTimeout(() => { reconnect(); route(); }); // once the dialog has closed
});
addEventListener("hashchange", route);
route();
const reconnect = follow(update, fail);
