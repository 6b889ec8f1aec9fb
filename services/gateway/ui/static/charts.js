// Four charts of the last ten minutes, drawn by uPlot from the points that the gateway kept.

import uPlot from "/ui/vendor/uPlot.esm.js";

const MOST_POINTS = 600;
const percent = (value) => (value == null ? "" : `${Math.round(value * 100)} %`);
const plain = (value) => (value == null ? "" : value >= 10000 ? `${Math.round(value / 1000)}k` : String(+value.toFixed(1)));
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
    this.build();
    new ResizeObserver(() => this.plots.forEach((plot) => this.fit(plot))).observe(root);
  }

  /** Anew, in the colours of the theme. */
  build() {
    const colours = getComputedStyle(document.documentElement);
    const colour = (name) => colours.getPropertyValue(`--${name}`).trim();
    this.root.replaceChildren();
    this.plots = KINDS.map((kind) => {
      const box = document.createElement("div");
      box.className = "chart";
      const title = document.createElement("h3");
      title.textContent = kind.title;
      for (const [, label, name] of kind.names) {
        const mark = document.createElement("i");
        mark.textContent = label;
        mark.style.color = colour(name);
        title.append(mark);
      }
      box.append(title);
      this.root.append(box);
      const axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
      return new uPlot({
        width: Math.max(180, box.clientWidth), height: 120, cursor: { show: false }, legend: { show: false },
        scales: { y: { range: (u, least, most) => [0, kind.most ?? Math.max(1, most * 1.15)] } },
        axes: [{ ...axis, size: 24, values: "{HH}:{mm}", space: 70 },
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

  /** All points, or one more; a point that is there already changes nothing. */
  reset(points) { this.points = points.slice(-MOST_POINTS); this.draw(); }
  add(point) {
    const last = this.points.at(-1);
    if (!point || (last && point.unix_s <= last.unix_s)) return;
    this.points.push(point);
    if (this.points.length > MOST_POINTS) this.points.shift();
    this.draw();
  }
  draw() { this.plots.forEach((plot, index) => plot.setData(this.data(KINDS[index]))); }
}
