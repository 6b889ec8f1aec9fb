// The live page: one picture at a time from the stream onto the elements of index.html.

import { Charts } from "/ui/charts.js";
import { showDebts } from "/ui/debts.js";
import { Details } from "/ui/details.js";
import { byId, count, element, percent, rows, say, seconds, short, tenths } from "/ui/dom.js";
import { showEvents } from "/ui/events.js";
import { follow } from "/ui/stream.js";
import { Traffic } from "/ui/traffic.js";
import { WorkerGrid } from "/ui/workers.js";

const MOST_EVENTS = 200, MOST_TENANTS = 50;

const store = {
  get: (name) => { try { return sessionStorage.getItem(name); } catch { return null; } },
  set: (name, value) => { try { sessionStorage.setItem(name, value); } catch { /* private mode */ } },
};
const fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.get("key")) {
  store.set("key", fragment.get("key"));
  history.replaceState(null, "", location.pathname);
}
const key = () => store.get("key") ?? "";

async function ask(path) {
  const response = await fetch(path, { headers: key() ? { authorization: `Bearer ${key()}` } : {}, cache: "no-store" });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error?.message ?? `status ${response.status}`);
  return body;
}

// --- theme

const themes = matchMedia("(prefers-color-scheme: dark)");
function theme(name) {
  document.documentElement.dataset.theme = name;
  store.set("theme", name);
  charts.build();
}
document.documentElement.dataset.theme = fragment.get("theme") ?? store.get("theme") ?? (themes.matches ? "dark" : "light");

const charts = new Charts(byId("charts"));
const details = new Details(ask);
const grid = new WorkerGrid(byId("worker-grid"), (id) => details.worker(id));
new Traffic(key);
byId("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

// --- the picture

let isPaused = false, isNews = true, events = [], heard = 0;

const TILES = [
  ["workers", (p) => String(p.totals.workers)],
  ["running", (p) => String(p.fleet.running)],
  ["queued", (p) => String(p.fleet.queued)],
  ["tokens a second", (p, point) => (point ? count(point.tokens_per_s) : "0")],
  ["of KV in use", (p) => percent(p.totals.tokens.used / Math.max(1, p.totals.tokens.total))],
  ["of prompt blocks found", (p) => { const { misses, device, host, disk, peer } = p.totals.hits; const found = device + host + disk + peer;
    return found + misses ? percent(found / (found + misses)) : "–"; }],
  ["cached tokens expected / found", (p) => { const { expected = 0, found = 0 } = p.fleet.hit_tokens; return `${count(expected)} / ${count(found)}`; }],
  ["preempted", (p) => String(p.fleet.preemptions)],
  ["tokens lent", (p) => count(p.totals.tokens.lent)],
];
byId("tiles").append(...TILES.map(([name]) => {
  const tile = element("div", { className: "tile" }, element("b", { text: "–" }), element("span", { text: name }));
  tile.dataset.tile = name;
  return tile;
}));

function requestButton(id) {
  return element("button", { text: short(id), title: id, onClick: () => details.request(id) });
}

const held = (row) => (row.waiting ?? 0) + (row.running ?? 0);

function show(picture) {
  const point = charts.points.at(-1);
  [...byId("tiles").children].forEach((tile, index) => say(tile.firstElementChild, TILES[index][1](picture, point)));
  grid.show(picture.workers);
  const queue = picture.queue ?? [];
  say(byId("queue-note"), picture.fleet.queued ? `${picture.fleet.queued} wait, in the order in which they go (${picture.fleet.policy})` : "");
  rows(byId("queue-rows"), queue, (row, index) => [index + 1, requestButton(row.request), short(row.tenant), row.prompt_tokens,
    row.predicted_tokens, seconds(row.waited_s), row.worker || "any"], "nobody waits");
  const tenants = [...(picture.tenants ?? [])].sort((a, b) => held(b) - held(a));
  say(byId("tenants-note"), tenants.length > MOST_TENANTS ? `the busiest ${MOST_TENANTS} of ${tenants.length}` : "tokens since this scheduler took over");
  rows(byId("tenant-rows"), tenants.slice(0, MOST_TENANTS), (row) => [row.tenant, row.waiting, row.running, row.sequences,
    count(row.computed_tokens + row.cached_tokens), count(row.cached_tokens), count(row.generated_tokens), tenths(row.charged_s)], "nobody was served yet");
  say(byId("requests-note"), picture.open_requests > picture.requests.length ? `the latest ${picture.requests.length} of ${picture.open_requests}` : "");
  rows(byId("request-rows"), picture.requests, (row) => [requestButton(row.id), row.worker ?? "queued",
    row.prompt_tokens, `${row.tokens}/${row.max_tokens}`, seconds(row.age_s)], "none; send one below");
  showDebts(byId("debt-rows"), picture.debts);
  const problem = [...picture.fleet.unready, ...picture.fleet.troubles].join("; ") || (picture.fleet.scheduler ? "" : "no scheduler is heard of");
  state(problem ? "bad" : "good", problem || `live: ${picture.fleet.scheduler}, ${picture.fleet.policy}`);
}

function showNews() { showEvents(byId("event-rows"), events, (id) => details.request(id)); }

function take(kind, data) {
  const picture = JSON.parse(data);
  if (kind === "whole") { charts.reset(picture.history); events = picture.events; isNews = true; }
  else {
    charts.add(picture.point);
    if (picture.events.length) { events = [...events, ...picture.events].slice(-MOST_EVENTS); isNews = true; }
  }
  if (isPaused) return;  // what is told only once is kept, and shown when the page goes on
  charts.draw();
  if (isNews) { showNews(); isNews = false; }
  show(picture);
  heard += 1;
  document.body.dataset.heard = String(heard);
}

let stated = ["warn", "connecting"];
function state(how, text) {
  stated = [how, text];
  document.querySelector(".dot").className = `dot ${how}`;
  say(byId("state-text"), isPaused ? `held still; ${text}` : text);
}

function pause() {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  byId("pause").textContent = isPaused ? "Go on" : "Pause";
  state(...stated);
}

function begin() {
  byId("key-form").hidden = true;
  follow("/ui/stream", key, take, (how, text) => {
    if (how === "key") { byId("key-form").hidden = false; say(byId("key-text"), text); byId("key").focus(); state("warn", "needs a key"); }
    else if (how === "away") state("bad", `not connected (${text}); trying again`);
  });
}
byId("key-form").addEventListener("submit", (event) => { event.preventDefault(); store.set("key", byId("key").value.trim()); begin(); });
byId("find").addEventListener("submit", (event) => { event.preventDefault(); const id = byId("find-id").value.trim(); if (id) details.request(id); });
byId("pause").addEventListener("click", pause);
addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|TEXTAREA|BUTTON|A)$/.test(document.activeElement?.tagName ?? "");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || byId("detail").open) return;
  if (event.key === "/") { event.preventDefault(); byId("question").focus(); }
  else if (event.key === "t") byId("theme").click();
  else if (event.key === " ") { event.preventDefault(); byId("pause").click(); }
});
showNews();
begin();
