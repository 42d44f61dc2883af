// The last lines of a process, as its supervisor keeps them.
import {get, repeat} from "./api.js";
import {el, show} from "./dom.js";

export const title = "Logs";
const UPDATE_MS = 3000;

export function open(body, wanted, fail) {
  const choice = el("select", {onchange: () => update()}), text = el("input", {type: "search"});
  const lines = el("pre", {class: "logs", tabindex: 0, role: "log", "aria-label": "Log lines"});
  let kept = [], names = "";
  const draw = () => {
    const isAtEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    const word = text.value.toLowerCase();
    lines.textContent = kept.filter(line => line.toLowerCase().includes(word)).join("\n") ||
      "no such line is kept";
    if (isAtEnd) lines.scrollTop = lines.scrollHeight;
  };
  const update = async () => {
    if (!choice.value) return;
    const name = choice.value;
    try {
      const answer = await get(`logs/${encodeURIComponent(name)}`);
      if (name !== choice.value) return;
      kept = answer.lines;
      draw();
    } catch (error) {
      fail(error);
      show(lines, error.message);
    }
  };
  text.addEventListener("input", draw);
  body.append(el("div", {class: "row"}, el("label", {}, "process", choice),
    el("label", {}, "only lines with", text)), lines);
  return {
    close: repeat(update, UPDATE_MS, fail),
    update: ({processes}) => {
      const found = [...new Set(Object.values(processes).map(({name}) => name))].sort();
      if (found.join("\n") === names) return;
      const chosen = choice.value || wanted;
      names = found.join("\n");
      choice.replaceChildren(...found.map(name => el("option", {}, name)));
      choice.value = found.includes(chosen) ? chosen : found[0];
      update();
    },
  };
}
