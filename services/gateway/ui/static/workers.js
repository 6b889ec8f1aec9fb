// A card for each worker: its KV as a bar, what it lent and borrowed, what lies below the device, its batch.

import { clock, count, element, gigabytes, percent, say, seconds } from "/ui/dom.js";

const DENSE_FROM = 13, LATE_S = 2;
const PARTS = ["used", "borrowed", "evictable"];

function makeCard(id, onOpen) {
  const bar = element("span", { className: "bar" }, ...PARTS.map((part) => element("i", { className: part })));
  const thin = element("span", { className: "bar thin" }, element("i", { className: "below" }));
  const card = element("button", { className: "worker", onClick: () => onOpen(id) },
    element("span", { className: "top" }, element("b", { text: id }), element("span")), bar, thin, element("span", { className: "extra" }), element("span", { className: "extra memory" }));
  card.dataset.worker = id;
  return card;
}

function width(node, share) {
  const text = `${(Math.max(0, Math.min(1, share)) * 100).toFixed(1)}%`;
  if (node.style.width !== text) node.style.width = text;
}

function showCard(card, row, isDense, isOneModel) {
  const blocks = row.blocks, all = Math.max(1, blocks.total);
  const borrowed = Math.min(blocks.borrowed, blocks.used), running = row.sequences.decoding + row.sequences.prefilling;
  const [used, lent, cached] = card.querySelectorAll(".bar:not(.thin) i");
  width(used, (blocks.used - borrowed) / all);
  width(lent, borrowed / all);
  width(cached, blocks.evictable / all);
  const below = blocks.host + blocks.disk;
  const thin = card.querySelector(".bar.thin");
  thin.hidden = !below;
  width(thin.firstElementChild, below ? (blocks.host_used + blocks.disk_used) / below : 0);
  say(card.querySelector(".top span"), isDense ? percent(blocks.used / all) : `${percent(blocks.used / all)} of ${count(blocks.total)} blocks`);
  const { resident_mb: own, host_free_mb: free, host_mb: host, device_free_mb: deviceFree, device_mb: device } = row.memory ?? {};
  const memory = [own && `process ${gigabytes(own)}`, host && `host ${gigabytes(host - free)} of ${gigabytes(host)} used`,
    device && `device ${gigabytes(device - deviceFree)} of ${gigabytes(device)} used`].filter(Boolean).join(", ");
  say(card.querySelector(".memory"), memory);
  const extra = card.querySelector(".extra");
  const parts = [...(isOneModel ? [] : [row.model]), `${running} running`];
  if (row.sequences.waiting) parts.push(`${row.sequences.waiting} waiting`);
  if (row.decode_ms) parts.push(`${row.decode_ms.toFixed(1)} ms${isDense ? "" : " a step"}`);
  if (row.swapped_layers) parts.push(`${row.swapped_layers} layers swapped`);
  if (row.heard_s > LATE_S) parts.push(`not heard for ${seconds(row.heard_s)}`);
  const lentBlocks = blocks.lent + blocks.host_lent;
  const marks = [];
  if (lentBlocks) marks.push(element("b", { className: "lent", text: ` ${lentBlocks} lent` }));
  if (blocks.borrowed) marks.push(element("b", { className: "borrowed", text: ` ${blocks.borrowed} borrowed` }));
  extra.replaceChildren(parts.join(", "), ...marks);
  card.classList.toggle("late", row.heard_s > LATE_S);
  card.title = `${row.model}: ${blocks.used} in use, ${blocks.evictable} cached, ${blocks.free} free of ${blocks.total} blocks; host `
    + `${blocks.host_used}/${blocks.host}, disk ${blocks.disk_used}/${blocks.disk}; lent ${lentBlocks}, borrowed ${blocks.borrowed}${memory && `; ${memory}`}`;
}

/** Keeps cards that stay, so that focus and hover do; one card a worker. */
export class WorkerGrid {
  constructor(root, onOpen) { this.root = root; this.onOpen = onOpen; this.cards = new Map(); }

  show(workers) {
    const isDense = workers.length >= DENSE_FROM, isOneModel = new Set(workers.map((row) => row.model)).size < 2;
    this.root.classList.toggle("dense", isDense);
    const present = new Set(workers.map((row) => row.id));
    for (const [id, card] of this.cards) if (!present.has(id)) { card.remove(); this.cards.delete(id); }
    workers.forEach((row, index) => {
      let card = this.cards.get(row.id);
      if (!card) { card = makeCard(row.id, this.onOpen); this.cards.set(row.id, card); }
      if (this.root.children[index] !== card) this.root.insertBefore(card, this.root.children[index] ?? null);
      showCard(card, row, isDense, isOneModel);
    });
  }

  /** Cards of workers that are gone or have just come back, after the others. */
  showDeparted(rows, now) {
    this.root.querySelectorAll(".gone, .back").forEach((card) => card.remove());
    this.root.append(...rows.map((row) => {
      const text = row.back_unix_s ? `back since ${clock(row.back_unix_s)}` : `gone since ${clock(row.gone_unix_s)}, ${seconds(Math.max(0, now - row.gone_unix_s))} ago`;
      const card = element("div", { className: `worker ${row.back_unix_s ? "back" : "gone"}` },
        element("span", { className: "top" }, element("b", { text: row.id }), element("span", { text })),
        element("span", { className: "extra", text: row.why || (row.back_unix_s ? `was away for ${seconds(row.back_unix_s - row.gone_unix_s)}` : `served ${row.model}`) }));
      card.dataset.departed = row.id;
      return card;
    }));
  }
}
