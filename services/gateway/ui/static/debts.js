// Who lends to whom: a graph beside a matrix while few are in it, a matrix up to 16, then a list.

import { drawn, element, rows } from "/ui/dom.js";

const AS_GRAPH = 8, AS_MATRIX = 16;
const SIZE = 260, RADIUS = 92, NODE = 15;

const blocksOf = (debt) => debt.blocks + debt.host_blocks;

export function showDebts(box, debts) {
  if (!debts.length) { box.replaceChildren(element("p", { className: "empty", text: "nobody owes anybody" })); return; }
  const names = [...new Set(debts.flatMap((debt) => [debt.creditor, debt.debtor]))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  if (names.length > AS_MATRIX) { box.replaceChildren(list(debts)); return; }
  box.replaceChildren(...(names.length <= AS_GRAPH ? [graph(names, debts)] : []), matrix(names, debts));
}

function list(debts) {
  const body = element("tbody");
  const made = element("table", {}, element("thead", {}, element("tr", {}, ...["lends", "holds", "blocks"].map((text) => element("th", { text })))), body);
  rows(body, [...debts].sort((a, b) => blocksOf(b) - blocksOf(a)), (debt) => [debt.creditor, debt.debtor, blocksOf(debt)], "");
  return made;
}

function matrix(names, debts) {
  const body = element("tbody");
  body.append(...names.map((creditor) => element("tr", {}, element("th", { text: creditor }), ...names.map((debtor) => {
    const debt = debts.find((each) => each.creditor === creditor && each.debtor === debtor);
    return element("td", { text: debt ? String(blocksOf(debt)) : "·", className: debt ? "some" : "" });
  }))));
  return element("table", {}, element("thead", {}, element("tr", {}, element("th"), ...names.map((text) => element("th", { text })))), body);
}

/** Names on a circle; an arrow from who lends to who holds, as thick as the debt is large. */
function graph(names, debts) {
  const middle = SIZE / 2, most = Math.max(...debts.map(blocksOf), 1);
  const place = (name) => {
    const turn = (2 * Math.PI * names.indexOf(name)) / names.length - Math.PI / 2;
    return [middle + RADIUS * Math.cos(turn), middle + RADIUS * Math.sin(turn)];
  };
  const arrows = debts.filter((debt) => blocksOf(debt)).flatMap((debt) => {
    const [x1, y1] = place(debt.creditor), [x2, y2] = place(debt.debtor);
    const far = Math.hypot(x2 - x1, y2 - y1) || 1, [ux, uy] = [(x2 - x1) / far, (y2 - y1) / far];
    const [bend, tip] = [18, NODE + 5];  // two who owe each other have two arrows
    const [cx, cy] = [(x1 + x2) / 2 - uy * bend, (y1 + y2) / 2 + ux * bend];
    const from = `${x1 + ux * NODE - uy * 3} ${y1 + uy * NODE + ux * 3}`, to = `${x2 - ux * tip - uy * 3} ${y2 - uy * tip + ux * 3}`;
    const line = drawn("path", { d: `M ${from} Q ${cx} ${cy} ${to}`, class: "debt", "stroke-width": 1 + (3 * blocksOf(debt)) / most, "marker-end": "url(#tip)" });
    const label = drawn("text", { x: cx, y: cy + 4, class: "amount" }, String(blocksOf(debt)));
    return [line, label];
  });
  const nodes = names.flatMap((name) => {
    const [x, y] = place(name);
    return [drawn("circle", { cx: x, cy: y, r: NODE }), drawn("text", { x, y: y + 4, class: "name" }, name.replace(/^worker-/, ""))];
  });
  const tip = drawn("marker", { id: "tip", viewBox: "0 0 6 6", refX: 3, refY: 3, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" },
    drawn("path", { d: "M 0 0 L 6 3 L 0 6 z" }));
  const said = debts.map((debt) => `${debt.creditor} lends ${blocksOf(debt)} to ${debt.debtor}`).join(", ");
  return drawn("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-label": said }, drawn("defs", {}, tip), ...arrows, ...nodes);
}
