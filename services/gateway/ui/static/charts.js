// Charts of one series of points each, drawn by uPlot from what the gateway kept.

import uPlot from "/ui/vendor/uPlot.esm.js";

const percent = (value) => (value == null ? "" : `${Math.round(value * 100)} %`);
const plain = (value) => (value == null ? "" : value >= 10000 ? `${Math.round(value / 1000)}k` : String(+value.toFixed(1)));
const times = (plot, splits) => splits.map((unix) => new Date(unix * 1000).toLocaleTimeString([], {
  hour12: false, hour: "2-digit", minute: "2-digit", ...(splits[1] - splits[0] < 60 ? { second: "2-digit" } : {}) }));
const span = (value) => (value == null ? "" : value < 1 ? `${Math.round(value * 1000)} ms` : `${+value.toFixed(1)} s`);
const shares = (name) => [[`${name}0`, "p50", "good"], [`${name}1`, "p95", "used"], [`${name}2`, "p99", "borrowed"]];
export const LATENCY_KINDS = [
  { title: "to the first token", names: shares("first_token_s"), show: span, least: 0.01 },
  { title: "between tokens", names: shares("token_s"), show: span, least: 0.01 },
  { title: "whole answer", names: shares("whole_s"), show: span, least: 0.01 },
];
export const LOAD_KINDS = [
  { title: "KV in use", names: [["kv", "in use", "used"], ["cached", "cached", "evictable"]], show: percent, most: 1 },
  { title: "sequences", names: [["running", "running", "used"], ["queued", "queued", "borrowed"]], show: plain },
  { title: "tokens a second", names: [["tokens_per_s", "answers", "good"], ["prompt_tokens_per_s", "prompts", "borrowed"]], show: plain },
  { title: "prompt tokens saved", names: [["hit_share", "share", "lent"]], show: percent, most: 1 },
];

export class Charts {
  /** `most`: how many points are kept. */
  constructor(root, kinds, most) {
    this.root = root;
    this.kinds = kinds;
    this.most = most;
    this.points = [];
    this.plots = [];
    this.isDrawn = false;
    this.build();
    new ResizeObserver(() => this.plots.forEach((plot) => this.fit(plot))).observe(root);
  }

  /** Anew, in the colours of the theme. */
  build() {
    const colours = getComputedStyle(document.documentElement);
    const colour = (name) => colours.getPropertyValue(`--${name}`).trim();
    const boxes = this.kinds.map(() => document.createElement("div"));
    this.root.replaceChildren(...boxes);  // all of them first: the width of each is known only then
    this.plots = this.kinds.map((kind, index) => {
      const box = boxes[index];
      box.className = "chart";
      const title = document.createElement("h3");
      title.textContent = kind.title;
      for (const [, label, name] of kind.names) {
        const mark = document.createElement("i");
        mark.textContent = label;
        mark.style.setProperty("--c", colour(name));
        title.append(mark);
      }
      box.append(title);
      const axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
      return new uPlot({
        width: Math.max(180, box.clientWidth), height: 120, cursor: { show: false }, legend: { show: false },
        scales: { y: { range: (u, least, most) => [0, kind.most ?? Math.max(kind.least ?? 1, most * 1.15)] } },
        axes: [{ ...axis, size: 24, values: times, space: 70 },
          { ...axis, size: 46, space: 28, values: (u, splits) => splits.map(kind.show) }],
        series: [{}, ...kind.names.map(([, , name]) => ({ stroke: colour(name), width: 1.5, points: { show: false } }))],
      }, this.data(kind), box);
    });
  }

  fit(plot) {
    const width = plot.root.parentElement.clientWidth;
    if (width > 0 && width !== plot.width) plot.setSize({ width, height: 120 });
  }

  data(kind) {
    return [this.points.map((point) => point.unix_s), ...kind.names.map(([name]) => this.points.map((point) => point[name]))];
  }

  /** All points, or one more; a point that is there already changes nothing. `draw` shows them. */
  reset(points) { this.points = points.slice(-this.most); this.isDrawn = false; }
  add(point) {
    const last = this.points.at(-1);
    if (!point || (last && point.unix_s <= last.unix_s)) return;
    this.points.push(point);
    if (this.points.length > this.most) this.points.shift();
    this.isDrawn = false;
  }
  draw() {
    if (this.isDrawn) return;
    this.plots.forEach((plot, index) => plot.setData(this.data(this.kinds[index])));
    this.isDrawn = true;
  }
}
