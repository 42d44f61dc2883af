// A chat with a model: under each answer its worker, cache, pace and story.
import {events, findStories, get, headers} from "./api.js";
import {el, link, seconds, show} from "./dom.js";
import {shortName} from "./overview.js";
import {timeline} from "./request.js";

export const title = "Playground";

async function send(frontend, body, signal, onText) {
  const began = performance.now();
  const answer = await fetch(`${frontend}/v1/chat/completions`, {method: "POST", signal,
    headers: {"content-type": "application/json", ...headers()}, body: JSON.stringify(body)});
  if (!answer.ok) {
    const {error} = await answer.json().catch(() => ({}));
    throw new Error(error ? error.message : `status ${answer.status}`);
  }
  let first, usage = {}, end = "";
  for await (const event of events(answer)) {
    if (event.error) throw new Error(event.error.message);
    const choice = (event.choices || [])[0] || {};
    const {reasoning_content: thought, content} = choice.delta || {};
    if (thought || content) {
      first ??= performance.now();
      onText(thought || "", content || "");
    }
    end = choice.finish_reason || end;
    usage = event.usage || usage;
  }
  const took = (performance.now() - began) / 1e3;
  const writing = first === undefined ? 0 : (performance.now() - first) / 1e3;
  return {request: answer.headers.get("x-request-id"), worker: answer.headers.get("x-dynamo-worker"),
    usage, took, end, pace: writing > 0 ? Math.max(0, (usage.completion_tokens || 0) - 1) / writing : 0,
    first: first === undefined ? null : (first - began) / 1e3};
}
function summary({usage, worker, took, end, first, pace}) {
  const cached = (usage.prompt_tokens_details || {}).cached_tokens || 0;
  return `${shortName(worker || "unknown worker")}: ${usage.prompt_tokens || 0} tokens in, ${cached
  } cached, ${usage.completion_tokens || 0} out; first after ${seconds(first)}, ${
    pace.toFixed(1)} tokens/s, ${seconds(took)} in all${
    end === "length" ? "; cut: see `tokens at most`" : ""}`;
}
export function open(body, _, fail) {
  const model = el("select"), limit = el("input", {type: "number", min: 1, value: 128});
  const prompt = el("textarea", {placeholder: "Say a word.", required: true});
  const turns = el("div", {"aria-live": "polite"}), messages = [];
  const go = el("button", {}, "Send"), stop = el("button", {type: "button", disabled: true}, "Stop");
  let frontend, running = new AbortController();

  async function ask(text) {
    const answer = el("div"), about = el("p", {class: "dim"}, "..."), story = el("div");
    turns.append(el("article", {class: "turn"}, el("p", {}, el("b", {}, text)), answer, about, story));
    messages.push({role: "user", content: text});
    const words = {model: model.value, messages, stream: true, stream_options: {include_usage: true},
      max_tokens: Number(limit.value) || 128};
    running = new AbortController();
    go.disabled = !(stop.disabled = false);
    let thoughts = "", said = "";
    try {
      const result = await send(frontend, words, running.signal, (thought, content) => {
        thoughts += thought;
        said += content;
        show(answer, thoughts ? el("p", {class: "dim"}, thoughts) : null, el("p", {}, said));
      });
      messages.push({role: "assistant", content: said});
      about.textContent = summary(result);
      findStories(result.request).then(([found]) => show(story, el("p", {}, el("b", {}, found.verdict),
        " ", link("more", "request", found.request_id)), timeline(found)),
      error => show(story, el("p", {class: "dim"}, error.message)));
    } catch (error) {
      messages.pop();
      show(about, el("span", {class: "bad"}, error.name === "AbortError" ? "stopped" : error.message));
    }
    go.disabled = !(stop.disabled = true);
    prompt.focus();
  }
  stop.addEventListener("click", () => running.abort());
  const form = el("form", {onsubmit: event => {
    event.preventDefault();
    const text = prompt.value.trim();
    if (!text || go.disabled || !frontend) return;
    prompt.value = "";
    ask(text);
  }}, el("div", {class: "row"}, el("label", {}, "model", model),
    el("label", {}, "tokens at most", limit)), el("label", {class: "long"}, "message", prompt),
  el("div", {class: "row"}, go, stop));
  prompt.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  const note = el("p", {class: "bad"});
  body.append(note, turns, form);
  return {
    close: () => running.abort(),
    update: ({frontends}) => {
      if (frontend !== undefined) return;
      [frontend = null] = frontends;
      if (!frontend) {
        note.textContent = "This browser reaches no frontend: server.http_host listens elsewhere.";
        return;
      }
      get("/v1/models", frontend).then(({data}) => model.replaceChildren(...data.map(({id}) =>
        el("option", {}, id))), error => {
        note.textContent = error.message;
        fail(error);
      });
    },
  };
}
