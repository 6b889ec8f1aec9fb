// KV on the move, in the last ten seconds: between the tiers of a worker, and between workers.

import { count, element } from "/ui/dom.js";

const SHOWN_S = 10, MOST_ROWS = 12;
/** Counters of a worker's row, and the way that their blocks took. */
const PATHS = [
  [(row) => row.written.host, "device", "host"], [(row) => row.written.disk, "host", "disk"], [(row) => row.written.peer, "device", "other workers"],
  [(row) => row.hits.host, "host", "device"], [(row) => row.hits.disk, "disk", "device"], [(row) => row.hits.peer, "other workers", "device"],
];
const debtsOf = (picture) => new Map(picture.debts.map((debt) => [`${debt.creditor} ${debt.debtor}`, debt.blocks + debt.host_blocks]));

export class Moving {
  constructor(root) { this.root = root; this.before = null; this.found = []; }

  note(unix, from, to, what, amount) { if (amount > 0) this.found.push({ unix, from, to, what, amount }); }

  /** Notes what moved since the picture before. */
  take(picture) {
    const before = this.before, unix = picture.unix_s;
    this.found = this.found.filter((each) => each.unix > unix - SHOWN_S);
    this.before = { workers: new Map(picture.workers.map((row) => [row.id, row])), debts: debtsOf(picture) };
    for (const event of picture.events ?? []) {
      if (event.kind === "moved" && !event.failed) this.note(event.unix_s, event.source, event.target, "bytes of one sequence", event.moved_bytes);
    }
    if (!before) return;
    for (const row of picture.workers) {
      const old = before.workers.get(row.id);
      if (old) for (const [of, from, to] of PATHS) this.note(unix, `${row.id} ${from}`, to, "blocks", of(row) - of(old));
    }
    const debts = this.before.debts;
    for (const pair of new Set([...debts.keys(), ...before.debts.keys()])) {
      const [creditor, debtor] = pair.split(" "), more = (debts.get(pair) ?? 0) - (before.debts.get(pair) ?? 0);
      this.note(unix, creditor, debtor, "blocks lent", more);
      this.note(unix, debtor, creditor, "blocks given back", -more);
    }
  }

  /** Shows the ten seconds before `unix`; returns whether anything moved. */
  draw(unix) {
    this.found = this.found.filter((each) => each.unix > unix - SHOWN_S);
    const sums = new Map();
    for (const { from, to, what, amount } of this.found) {
      const key = [from, to, what].join();
      sums.set(key, { from, to, what, amount: amount + (sums.get(key)?.amount ?? 0) });
    }
    const rows = [...sums.values()].sort((a, b) => b.amount - a.amount).slice(0, MOST_ROWS)
      .sort((a, b) => a.from.localeCompare(b.from, undefined, { numeric: true }));
    if (this.root.children.length !== rows.length) {
      this.root.replaceChildren(...rows.map(() => element("li", {}, element("span"), element("i"), element("span"), element("b"))));
    }
    rows.forEach((row, index) => [row.from, null, row.to, `${count(row.amount)} ${row.what}`].forEach((text, at) => {
      if (text !== null && this.root.children[index].children[at].textContent !== text) this.root.children[index].children[at].textContent = text;
    }));
    return rows.length > 0;
  }
}
