// Elements and texts. Names and texts of clients get into the page as text nodes only.
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {}))
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value);
  node.append(...children.flat(Infinity).filter(child => child !== undefined && child !== null));
  return node;
}
export const el = (name, attributes, ...children) =>
  fill(document.createElement(name), attributes, children);
const draw = (name, attributes, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);

// Make a node look like a new one. What is equal stays, so that focus and scrolling do.
function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const {name} of [...old.attributes])
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const {name, value} of fresh.attributes)
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((node, at) => (at < before.length ? morph(before[at], node) : old.append(node)));
  before.slice(after.length).forEach(node => node.remove());
  return undefined;
}
// Show these children in a node. They must have no listeners.
export function show(parent, ...children) {
  morph(parent, fill(parent.cloneNode(false), {}, children));
}

export const link = (text, page, argument) =>
  el("a", {href: `#${page}${argument === undefined ? "" : `/${encodeURIComponent(argument)}`}`},
    text);

// `columns`: [title, class]; the cells of a row are nodes or texts.
export function table(label, columns, rows, empty) {
  if (!rows.length) return el("p", {class: "dim"}, empty || "none");
  const head = columns.map(([title, style]) => el("th", {class: style, scope: "col"}, title));
  const body = rows.map(cells => el("tr", {}, cells.map((cell, at) =>
    el("td", {class: columns[at][1]}, cell))));
  return el("div", {class: "wrap", tabindex: 0, role: "region", "aria-label": label},
    el("table", {class: columns.some(([, style]) => style === "text") && "told"}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}
export const facts = pairs => el("dl", {}, pairs.filter(([, value]) => value !== "" &&
  value !== undefined && value !== null).map(([name, value]) =>
  [el("dt", {}, name), el("dd", {}, value)]));

// A curve of values, oldest first, at their times or equally spaced. null: not known then. `mark`: the index of a
// value under a vertical line.
export function curve(label, values, {top, style = "", at: times, mark} = {}) {
  const width = 300, height = 40, known = values.filter(value => value !== null);
  const most = top || Math.max(...known, 0) || 1, step = width / Math.max(1, values.length - 1);
  const scale = times && times.length > 1 ? width / (times[times.length - 1] - times[0]) : 0;
  const place = index => (scale ? (times[index] - times[0]) * scale : index * step);
  const svg = draw("svg", {viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none",
    role: "img", "aria-label": `${label}: ${known.length ? "up to " : "nothing "}${
      known.length ? short(Math.max(...known)) : "yet"}`, class: style});
  let points = [];
  const end = () => {
    if (points.length) {
      const line = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
      const first = points[0][0], last = points[points.length - 1][0];
      if (first === last) svg.append(draw("rect", {x: Math.max(0, first - 1.5), width: 3,
        y: points[0][1], height: height - points[0][1]}));
      svg.append(draw("polygon", {points: `${first},${height} ${line} ${last},${height}`}),
        draw("polyline", {points: line}));
    }
    points = [];
  };
  values.forEach((value, at) => {
    if (value === null) return end();
    points.push([place(at), height - 1 - Math.min(1, value / most) * (height - 2)]);
    return undefined;
  });
  end();
  if (mark !== undefined)
    svg.append(draw("line", {x1: place(mark), x2: place(mark), y1: 0, y2: height}));
  return svg;
}
// A bar from one share to another, 0 to 1.
export const bar = (label, from, to) => draw("svg", {viewBox: "0 0 100 10", role: "img", class: "bar",
  preserveAspectRatio: "none", "aria-label": label},
draw("rect", {class: "rest", width: 100, height: 10}),
draw("rect", {x: Math.min(99, from * 100), width: Math.max(1, (to - from) * 100), height: 10}));

export const short = value => value >= 1e6 ? `${(value / 1e6).toFixed(1)}M`
  : value >= 1e4 ? `${(value / 1e3).toFixed(1)}k` : `${Math.round(value * 100) / 100}`;
export const share = ratio => ratio === null || ratio === undefined ? "-"
  : `${Math.round(ratio * 100)}%`;
export const seconds = value => value === null || value === undefined ? "-"
  : value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1e3).toFixed(value < 0.1 ? 1 : 0)} ms`;
export const clock = at => new Date(at * 1e3).toLocaleTimeString([], {hour12: false});
export const age = value => value >= 86400 ? `${Math.floor(value / 86400)}d`
  : value >= 3600 ? `${Math.floor(value / 3600)}h` : value >= 60 ? `${Math.floor(value / 60)}m`
    : `${Math.floor(value)}s`;
