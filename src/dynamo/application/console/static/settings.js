// The settings that are no defaults, and where each comes from.
import {get} from "./api.js";
import {el, show, table} from "./dom.js";

export const title = "Settings";

export function open(body, _, fail) {
  const word = el("input", {type: "search"}), rows = el("div");
  let settings = [];
  const draw = () => show(rows, table("Settings", [["setting", "name"], ["value", "text"],
    ["comes from", "text"]], settings.filter(each => each.key.includes(word.value.trim())).map(
    ({key, value, origin}) => [key, typeof value === "string" ? value : JSON.stringify(value),
      origin || "the start"]), "all settings have their defaults"));
  word.addEventListener("input", draw);
  body.append(el("p", {class: "dim"}, "Settings with their defaults are left out. Secrets are ***."),
    el("div", {class: "row"}, el("label", {}, "only keys with", word)), rows);
  get("settings").then(answer => { settings = answer.settings; draw(); }, fail);
}
