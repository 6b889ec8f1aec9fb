// Four charts of the last ten minutes, drawn by uPlot from the points that the gateway kept.

import uPlot from "/ui/vendor/uPlot.esm.js";

const MOST_POINTS = 600;
const percent = (value) => (value == null ? "" : `${Math.round(value * 100)} %`);
const plain = (value) => (value == null ? "" : value >= 10000 ? `${Math.round(value / 1000)}k` : String(+value.toFixed(1)));
const times = (plot, splits) => splits.map((unix) => new Date(unix * 1000).toLocaleTimeString([], {
  hour12: false, hour: "2-digit", minute: "2-digit", ...(splits[1] - splits[0] < 60 ? { second: "2-digit" } : {}) }));
const KINDS = [
  { title: "KV in use", names: [["kv", "in use", "used"], ["cached", "cached", "evictable"]], show: percent, most: 1 },
  { title: "sequences", names: [["running", "running", "used"], ["queued", "queued", "borrowed"]], show: plain },
  { title: "tokens a second", names: [["tokens_per_s", "answers", "good"]], show: plain },
  { title: "prompt blocks found", names: [["hit_share", "share", "lent"]], show: percent, most: 1 },
];

export class Charts {
  constructor(root) {
    this.root = root;
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
    const boxes = KINDS.map(() => document.createElement("div"));
    this.root.replaceChildren(...boxes);  // all of them first: the width of each is known only then
    this.plots = KINDS.map((kind, index) => {
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
        scales: { y: { range: (u, least, most) => [0, kind.most ?? Math.max(1, most * 1.15)] } },
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
  reset(points) { this.points = points.slice(-MOST_POINTS); this.isDrawn = false; }
  add(point) {
    const last = this.points.at(-1);
    if (!point || (last && point.unix_s <= last.unix_s)) return;
    this.points.push(point);
    if (this.points.length > MOST_POINTS) this.points.shift();
    this.isDrawn = false;
  }
  draw() {
    if (this.isDrawn) return;
    this.plots.forEach((plot, index) => plot.setData(this.data(KINDS[index])));
    this.isDrawn = true;
  }
}
