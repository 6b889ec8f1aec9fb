// Predicted against true lengths of answers: a point each, on axes by powers of ten.

import { count, drawn, percent, say } from "/ui/dom.js";

const WIDE = 520, HIGH = 220, LEFT = 34, BELOW = 30, MOST = 400;
const share = (items, is) => items.filter(is).length / Math.max(1, items.length);

export class Lengths {
  constructor(root, note) { this.root = root; this.note = note; this.points = []; this.isDrawn = true; }

  reset(points) { this.points = points.slice(-MOST); this.isDrawn = false; }
  add(points) { if (points.length) this.reset([...this.points, ...points]); }

  /** Draws what is new; returns whether there is a point. */
  draw() {
    if (this.isDrawn || !this.points.length) return this.points.length > 0;
    this.isDrawn = true;
    const top = Math.ceil(Math.log10(Math.max(10, ...this.points.flatMap(([median, , length]) => [median, length]))));
    const at = (tokens) => Math.log10(Math.max(1, tokens)) / top;
    const x = (tokens) => LEFT + at(tokens) * (WIDE - LEFT - 16), y = (tokens) => HIGH - BELOW - at(tokens) * (HIGH - BELOW - 8);
    const lines = Array.from({ length: top + 1 }, (_, power) => 10 ** power).flatMap((tokens) => [
      drawn("line", { x1: x(tokens), x2: x(tokens), y1: y(1), y2: y(10 ** top) }), drawn("line", { x1: x(1), x2: x(10 ** top), y1: y(tokens), y2: y(tokens) }),
      drawn("text", { x: x(tokens), y: HIGH - BELOW + 13, "text-anchor": "middle" }, count(tokens)),
      drawn("text", { x: LEFT - 4, y: y(tokens) + 4, "text-anchor": "end" }, count(tokens))]);
    const equal = drawn("line", { x1: x(1), y1: y(1), x2: x(10 ** top), y2: y(10 ** top), class: "equal" });
    const points = this.points.map(([median, , length]) => drawn("circle", { cx: x(median), cy: y(length), r: 3 }));
    const said = `of the last ${this.points.length} answers ${percent(share(this.points, ([median, , length]) => length <= median))} were no longer than the median predicted, `
      + `${percent(share(this.points, ([, bound, length]) => length <= bound))} no longer than the 95 % bound`;
    const below = drawn("text", { x: (WIDE + LEFT) / 2, y: HIGH - 3, "text-anchor": "middle" }, "tokens predicted (median); upwards: tokens of the answer");
    this.root.replaceChildren(drawn("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": said }, ...lines, equal, ...points, below));
    say(this.note, said);
    return true;
  }
}
