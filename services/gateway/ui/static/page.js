// The live page: one picture at a time from the stream onto the elements of index.html.

import { Batches } from "/ui/batches.js";
import { Charts, LATENCY_KINDS, LOAD_KINDS } from "/ui/charts.js";
import { showDebts } from "/ui/debts.js";
import { Details } from "/ui/details.js";
import { byId, count, element, percent, rows, say, seconds, short, tenths } from "/ui/dom.js";
import { showEvents } from "/ui/events.js";
import { Lengths } from "/ui/lengths.js";
import { Moving } from "/ui/moving.js";
import { ask, key, setKey, theme } from "/ui/session.js";
import { follow } from "/ui/stream.js";
import { Traffic } from "/ui/traffic.js";
import { holdStill, showVerdict, state } from "/ui/verdict.js";
import { WorkerGrid } from "/ui/workers.js";

const MOST_EVENTS = 200, MOST_TENANTS = 50;

const charts = new Charts(byId("charts"), LOAD_KINDS, 600), latencies = new Charts(byId("latency-charts"), LATENCY_KINDS, 180);
const details = new Details(ask);
const grid = new WorkerGrid(byId("worker-grid"), (id) => details.worker(id));
const batches = new Batches(byId("batch-rows"), byId("batches-note")), moving = new Moving(byId("moving-rows"));
const lengths = new Lengths(byId("length-points"), byId("lengths-note"));
new Traffic();
theme(byId("theme"), () => { charts.build(); latencies.build(); });

// --- the picture

let isPaused = false, isNews = true, events = [], heard = 0;

/** Name, figure, and what it is. */
const TILES = [
  ["workers", (p) => String(p.totals.workers), "Workers that are heard of: kvasir_gateway_workers"],
  ["running", (p) => String(p.fleet.running), "Sequences that are computed now: kvasir_fleet_running"],
  ["queued", (p) => String(p.fleet.queued), "Sequences that wait for a worker: kvasir_fleet_queued"],
  ["tokens a second", (p, point) => (point ? count(point.tokens_per_s) : "0"), "Of answers, through this gateway: kvasir_gateway_output_tokens_total"],
  ["of KV in use", (p) => percent(p.totals.tokens.used / Math.max(1, p.totals.tokens.total)), "Of all workers' device memory for KV: kvasir_worker_kv_blocks"],
  ["of prompt tokens the cache saved", (p) => { const { misses, device, host, disk, peer } = p.totals.hits; const found = device + host + disk + peer;
    return found + misses ? percent(found / (found + misses)) : "–"; }, "Counted in whole blocks: kvasir_worker_prefix_blocks"],
  ["cached tokens expected / found", (p) => { const { expected = 0, found = 0 } = p.fleet.hit_tokens; return `${count(expected)} / ${count(found)}`; },
    "By placement when it chose the worker, and by the worker: kvasir_fleet_prefix_tokens"],
  ["preempted", (p) => String(p.fleet.preemptions), "Sequences that gave way to others: kvasir_fleet_preemptions"],
  ["tokens lent", (p) => count(p.totals.tokens.lent), "KV that workers hold for others: kvasir_worker_kv_blocks"],
];
byId("tiles").append(...TILES.map(([name, , title]) => {
  const tile = element("div", { className: "tile", title }, element("b", { text: "–" }), element("span", { text: name }));
  tile.dataset.tile = name;
  return tile;
}));

function requestButton(id) {
  return element("button", { text: short(id), title: id, onClick: () => details.request(id) });
}

const held = (row) => (row.waiting ?? 0) + (row.running ?? 0);

const three = (values) => (values ?? [null, null, null]).map(seconds);

/** Of the columns, for phones, where each figure stands below its name. */
const LATENCY_NAMES = ["model", "a second", ...["first token", "next token", "whole"].flatMap((name) => ["p50", "p95", "p99"].map((at) => `${name} ${at}`)),
  "refused", "errors"];

function showLatency(recent) {
  rows(byId("latency-rows"), recent, (row) => [row.model || "none", tenths(row.requests / 60), ...three(row.first_token_s), ...three(row.token_s),
    ...three(row.whole_s), row.refused, row.errors], "no request ended in the last minute");
  for (const row of byId("latency-rows").children) [...row.children].forEach((cell, index) => { cell.dataset.name = LATENCY_NAMES[index]; });
  latencies.draw();
}

/** Points of the chosen model, each percentile under a name of its own. */
const chosen = () => byId("latency-model").value;
function latencyPoint(point) {
  const row = point.models.find((each) => each.model === chosen()) ?? {};
  const flat = { unix_s: point.unix_s };
  for (const name of ["first_token_s", "token_s", "whole_s"]) (row[name] ?? [null, null, null]).forEach((value, index) => { flat[name + index] = value; });
  return flat;
}

let latencyPoints = [];
function offerModels() {
  const names = [...new Set(latencyPoints.flatMap((point) => point.models.map((each) => each.model)))].filter(Boolean);
  const select = byId("latency-model"), before = chosen();
  if (names.join() !== [...select.options].map((option) => option.value).join()) {
    select.replaceChildren(...names.map((text) => element("option", { text })));
    if (names.includes(before)) select.value = before;
  }
  byId("latency-of").hidden = names.length < 2;
  byId("latency-charts").hidden = !names.length;
  latencies.reset(latencyPoints.map(latencyPoint));
}
byId("latency-model").addEventListener("change", () => { offerModels(); latencies.draw(); });

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
  byId("queue").hidden = !queue.length;
  byId("tenants").hidden = !tenants.length;
  byId("debts").hidden = !picture.debts.length;
  byId("batches").hidden = !batches.steps.length;  // before it is drawn: its width is known only then
  byId("batches").hidden = !batches.draw(picture.unix_s);
  byId("moving").hidden = !moving.draw(picture.unix_s);
  byId("lengths").hidden = !lengths.draw();
  byId("dashboards").hidden = !picture.dashboards;
  if (picture.dashboards) byId("dashboards").href = picture.dashboards;
  showLatency(picture.recent ?? []);
  grid.showDeparted(picture.departed ?? [], picture.unix_s);
  showVerdict(picture);
}

function showNews() {
  showEvents(byId("event-rows"), events, (id) => details.request(id));
  byId("events").hidden = !events.length;
}

function take(kind, data) {
  const picture = JSON.parse(data);
  if (kind === "whole") {
    charts.reset(picture.history);
    latencyPoints = picture.latencies ?? [];
    offerModels();
    events = picture.events;
    isNews = true;
    batches.reset(picture.steps);
    lengths.reset(picture.lengths);
  }
  else {
    charts.add(picture.point);
    if (picture.latency && picture.latency.unix_s > (latencyPoints.at(-1)?.unix_s ?? 0)) {
      latencyPoints = [...latencyPoints, picture.latency].slice(-180);
      offerModels();
    }
    batches.add(picture.steps);
    lengths.add(picture.lengths);
    if (picture.events.length) { events = [...events, ...picture.events].slice(-MOST_EVENTS); isNews = true; }
  }
  moving.take(picture);
  if (isPaused) return;  // what is told only once is kept, and shown when the page goes on
  charts.draw();
  if (isNews) { showNews(); isNews = false; }
  show(picture);
  heard += 1;
  document.body.dataset.heard = String(heard);
}

function pause() {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  byId("pause").textContent = isPaused ? "Go on" : "Pause";
  holdStill(isPaused);
}

function begin() {
  byId("key-form").hidden = true;
  follow("/ui/stream", key, take, (how, text) => {
    if (how === "key") { byId("key-form").hidden = false; say(byId("key-text"), text); byId("key").focus(); state("warn", "needs a key"); }
    else if (how === "away") state("bad", `not connected (${text}); trying again`);
  });
}
byId("key-form").addEventListener("submit", (event) => { event.preventDefault(); setKey(byId("key").value); begin(); });
byId("find").addEventListener("submit", (event) => { event.preventDefault(); const id = byId("find-id").value.trim(); if (id) details.request(id); });
byId("pause").addEventListener("click", pause);
showNews();
begin();
