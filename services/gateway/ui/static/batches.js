// Batches as they form: every step of the last ten seconds, answers' rows above a line and prompts' tokens below it.

import { count, element, say, seconds } from "/ui/dom.js";

const SHOWN_S = 10, LATE_S = 1.2, MOST_WORKERS = 8, MOST_STEPS = 4096, HEIGHT = 64;  // steps are told once a second

export class Batches {
  constructor(root, note) { this.root = root; this.note = note; this.steps = []; this.rows = new Map(); }

  reset(steps) { this.steps = steps; }
  add(steps) { this.steps = [...this.steps, ...steps].slice(-MOST_STEPS); }

  /** Draws the ten seconds before `unix`; returns whether there was a step. */
  draw(unix) {
    const end = unix - LATE_S, begin = end - SHOWN_S;
    this.steps = this.steps.filter(([, at]) => at > begin - 1);
    const names = [...new Set(this.steps.map(([name]) => name))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    const shown = names.slice(0, MOST_WORKERS);
    say(this.note, names.length > shown.length ? `${shown.length} of ${names.length} workers` : "each step of the last ten seconds");
    for (const [name, row] of this.rows) if (!shown.includes(name)) { row.box.remove(); this.rows.delete(name); }
    for (const name of shown) this.one(this.row(name), this.steps.filter((step) => step[0] === name), begin, end);
    return shown.length > 0;
  }

  row(name) {
    if (!this.rows.has(name)) {
      const canvas = element("canvas"), said = element("span");
      canvas.setAttribute("role", "img");
      const box = element("div", { className: "batch" }, element("p", {}, element("b", { text: name }), " ", said), canvas);
      this.root.append(box);
      this.rows.set(name, { name, box, canvas, said });
    }
    return this.rows.get(name);
  }

  one({ name, canvas, said }, steps, begin, end) {
    const width = canvas.clientWidth, scale = globalThis.devicePixelRatio || 1;
    canvas.width = width * scale; canvas.height = HEIGHT * scale;
    const pen = canvas.getContext("2d"), colours = getComputedStyle(canvas);
    const colour = (which) => colours.getPropertyValue(`--${which}`).trim();
    const most = (index) => Math.max(1, ...steps.map((step) => step[index]));
    const [mostTokens, mostRows] = [most(3), most(4)], middle = HEIGHT / 2;
    pen.scale(scale, scale);
    pen.fillStyle = colour("line");
    pen.fillRect(0, middle, width, 1);
    for (const [, at, took, tokens, decodes] of steps) {
      const left = ((at - begin) / SHOWN_S) * width, wide = Math.max(1, (took / SHOWN_S) * width - 0.5);
      pen.fillStyle = colour("used");
      pen.fillRect(left, middle - (decodes / mostRows) * (middle - 1), wide, (decodes / mostRows) * (middle - 1));
      pen.fillStyle = colour("borrowed");
      pen.fillRect(left, middle + 1, wide, (tokens / mostTokens) * (middle - 1));
    }
    const last = steps.findLast(([, at]) => at <= end) ?? steps.at(-1);
    const text = `${count(last[4])} answers and ${count(last[3])} prompt tokens in ${seconds(last[2])}; at most ${count(mostRows)} and ${count(most(3))}`;
    say(said, text);
    canvas.setAttribute("aria-label", `${name}: ${text}`);
  }
}
