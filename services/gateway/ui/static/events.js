// Decisions in words: moves, what was done where memory ran out and for how much, preemptions, losses.

import { clock, count, element, seconds, short } from "/ui/dom.js";

const SHOWN = 60;
const BADGES = { moved: "good", "move begun": "", "move failed": "bad", relief: "warn", preempted: "warn", "worker lost": "bad" };
const because = (event) => (event.why ? ` (${event.why})` : "");
const TEXTS = {
  relief: (e) => `${e.worker} chose ${e.chosen}: ${e.offers.map(([rung, blocks, cost]) => `${rung} ${blocks} blocks for ${seconds(cost)}`).join(", ") || "nothing to offer"}`,
  "move begun": (e) => `to ${e.target} as ${e.mode}${because(e)}`,
  moved: (e) => `${e.source} → ${e.target} as ${e.mode}${because(e)}, ${count(e.moved_bytes)} bytes, ready in ${seconds(e.prepare_s)}, changed over in ${seconds(e.switch_s)}`,
  "move failed": (e) => `to ${e.target}: ${e.failed}`,
  preempted: (e) => `at ${e.worker}, ${e.mode}`,
  "worker lost": (e) => `${e.worker}, with ${e.sequences} sequences`,
};

/** The latest into `box`, newest first; `onRequest(id)` when one's request is clicked. */
export function showEvents(box, events, onRequest) {
  if (!events.length) { box.replaceChildren(element("li", { className: "empty", text: "none yet" })); return; }
  box.replaceChildren(...events.slice(-SHOWN).reverse().map((event) => {
    const kind = event.kind === "moved" && event.failed ? "move failed" : event.kind;
    const line = element("span", { text: (TEXTS[kind] ?? JSON.stringify)(event) + " " });
    if (event.request) line.append(element("small", {}, element("a", { text: short(event.request) })));
    const item = element("li", {}, element("time", { text: clock(event.unix_s) }), element("span", { className: `badge ${BADGES[kind] ?? ""}`, text: kind }), line);
    if (event.request) { const link = item.querySelector("a"); link.href = "#"; link.addEventListener("click", (click) => { click.preventDefault(); onRequest(event.request); }); }
    return item;
  }));
}
