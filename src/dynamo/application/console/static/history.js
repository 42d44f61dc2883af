// Workers over time: the samples that the observer keeps, and one more with each update.
import {get} from "./api.js";
import {share, short} from "./dom.js";

const RELOAD_MS = 120000; // older samples are further apart; so the observer thins them out
const RETRY_MS = 5000;
const part = (blocks, worker) => (worker.total_blocks ? blocks / worker.total_blocks : 0);

// `of` returns the value of a worker, `format` its text. `top`: the largest possible value.
export const MEASURES = {
  requests: {text: "requests, running and waiting", columns: ["running", "waiting"], format: short,
    of: worker => worker.running + worker.waiting},
  used: {text: "share of KV blocks in use", columns: ["active_blocks", "total_blocks"], top: 1,
    format: share, of: worker => part(worker.active_blocks, worker)},
  cached: {text: "share of KV blocks that hold a prefix", columns: ["cached_blocks", "total_blocks"],
    top: 1, format: share, of: worker => part(worker.cached_blocks, worker)},
  prompts: {text: "prompt tokens to compute", columns: ["prefill_tokens"], format: short,
    of: worker => worker.prefill_tokens},
  routed: {text: "requests routed to it a second", columns: ["routed"], format: short,
    of: (worker, seconds) => worker.routed / seconds},
};

// Follow some measures of all workers, or of one. A column is a number while its value does not change; null
// means: not known then. Returns what appends the workers of an update, and says whether there is more.
export function history(names, worker, fail) {
  const columns = [...new Set(names.flatMap(name => MEASURES[name].columns))];
  const self = {at: [], series: {}};
  let before = {}, loaded = -Infinity, isHere = false;

  async function load() {
    loaded = performance.now();
    const {at, workers} = await get(
      `router/timeline?columns=${columns}&worker=${encodeURIComponent(worker || "")}`);
    const value = (column, index) => (Array.isArray(column) ? column[index] : column);
    const gap = index => (index ? at[index] - at[index - 1] : 1);
    self.at = at;
    self.series = Object.fromEntries(names.map(name => [name, Object.fromEntries(
      Object.entries(workers).map(([instance, table]) => [instance, at.map((_, index) => {
        const row = Object.fromEntries(columns.map(column => [column, value(table[column], index)]));
        return columns.some(column => row[column] === null) ? null
          : MEASURES[name].of(row, gap(index));
      })]))]));
    isHere = true;
  }
  // Add the workers as they are now; before the samples are here, nothing.
  self.append = (state, workers) => {
    if (performance.now() - loaded > RELOAD_MS)
      load().catch(error => { loaded += RETRY_MS - RELOAD_MS; fail(error); });
    const {at} = self, last = at[at.length - 1] || state.at - 1;
    if (isHere && state.at > last) {
      for (const name of names)
        for (const each of workers.filter(({running}) => running !== undefined)) {
          if (worker && each.instance !== worker) continue;
          const values = self.series[name][each.instance] ||= at.map(() => null);
          const routed = Math.max(0, each.routed - (before[each.instance] ?? each.routed));
          values.push(MEASURES[name].of({...each, routed}, state.at - last));
        }
      at.push(state.at);
      for (const name of names)
        for (const values of Object.values(self.series[name]))
          if (values.length < at.length) values.push(null);
    }
    before = Object.fromEntries(workers.map(({instance, routed}) => [instance, routed]));
  };
  return self;
}

// Draw a row of pixels for each series onto a canvas, dark where its values are large.
export function drawMap(canvas, at, rows, top) {
  const width = 450, context = canvas.getContext("2d");
  canvas.width = width;
  canvas.height = Math.max(1, rows.length);
  canvas.style.height = `${Math.max(1, Math.min(12, Math.floor(520 / canvas.height))) * canvas.height}px`;
  const [red, green, blue] = getComputedStyle(canvas).color.match(/\d+/g).map(Number);
  const image = context.createImageData(width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer), colour = blue << 16 | green << 8 | red;
  const start = at[0], span = Math.max(1, at[at.length - 1] - start);
  const xs = at.map(time => Math.round((time - start) / span * (width - 1)));
  rows.forEach((values, row) => values.forEach((value, index) => {
    if (value === null) return;
    const alpha = 20 + Math.round(235 * Math.min(1, value / top)), from = index ? xs[index - 1] + 1 : 0;
    pixels.fill(alpha << 24 | colour, row * width + from, row * width + xs[index] + 1);
  }));
  context.putImageData(image, 0, 0);
}
