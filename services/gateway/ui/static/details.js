// What a click opens: a worker with its batch, or a request with where its time went.

import { byId, clock, element, rows, seconds, short } from "/ui/dom.js";

const COLOURS = ["used", "evictable", "borrowed", "lent", "below", "warn", "bad"];

export class Details {
  constructor(ask) {
    this.ask = ask;
    this.dialog = byId("detail");
    this.timer = 0;
    byId("detail-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => clearInterval(this.timer));
  }

  open(title, path, show, everyMs) {
    clearInterval(this.timer);
    byId("detail-title").textContent = title;
    byId("detail-body").replaceChildren(element("p", { className: "empty", text: "asking…" }));
    if (!this.dialog.open) this.dialog.showModal();
    const refresh = async () => {
      try {
        byId("detail-body").replaceChildren(...show(await this.ask(path)));
      } catch (error) {
        byId("detail-body").replaceChildren(element("p", { className: "empty", text: error.message }));
        clearInterval(this.timer);
      }
    };
    refresh();
    if (everyMs) this.timer = setInterval(refresh, everyMs);
  }

  worker(id) { this.open(id, `/ui/workers/${encodeURIComponent(id)}`, (told) => workerBody(told, (r) => this.request(r)), 1000); }
  request(id) { this.open(id, `/ui/requests/${encodeURIComponent(id)}`, requestBody, 0); }
}

function table(headings, items, make, empty) {
  const body = element("tbody");
  const made = element("table", {}, element("thead", {}, element("tr", {}, ...headings.map((text) => element("th", { text })))), body);
  rows(body, items, make, empty);
  return made;
}

function workerBody(told, onRequest) {
  const batch = table(["request", "state", "prompt", "answer", "computed", "blocks", "age"], told.batch, (row) => [
    element("button", { text: short(row.request), title: row.request, onClick: () => onRequest(row.request) }), row.state,
    row.prompt_tokens, `${row.generated_tokens}/${row.max_tokens}`, row.computed_tokens, row.blocks, seconds(row.waited_s)], "nobody here");
  const blocks = Object.entries(told.blocks), hits = Object.entries(told.hits);
  const said = Object.entries(told.details).filter(([, value]) => typeof value !== "object");
  return [element("h3", { text: "Batch" }), batch,
    element("h3", { text: "Blocks" }), table(blocks.map(([name]) => name), [blocks], (row) => row.map(([, value]) => value), ""),
    element("h3", { text: "Blocks of prompts, where they were found" }), table(hits.map(([name]) => name), [hits], (row) => row.map(([, value]) => value), ""),
    element("h3", { text: "All that it says" }), table(["name", "value"], said, ([name, value]) => [name, value], "nothing yet")];
}

function requestBody(told) {
  if (!told.events.length) return [element("p", { className: "empty", text: "nobody remembers this request: it is too long ago, or never was" })];
  const parts = [];
  if (told.account) parts.push(...accountBody(told.account));
  const began = told.events[0].unix_s;
  const shown = (event) => Object.entries(event).filter(([name]) => !["unix_s", "kind", "instance"].includes(name))
    .map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
  const recorded = table(["after", "where", "what", ""], told.events, (event) => [seconds(event.unix_s - began), event.instance, event.kind,
      element("span", { text: shown(event) })], "");
  recorded.className = "recorded";
  return [...parts, element("h3", { text: `What was recorded, from ${clock(began)} on` }), recorded];
}

function accountBody(account) {
  const lane = element("div", { className: "lane" });
  const colour = new Map(account.causes.map((cause, index) => [cause.cause, COLOURS[index] ?? "dim"]));
  for (const part of account.parts) {
    const piece = element("i", { title: `${part.cause}: ${seconds(part.end_s - part.begin_s)}` });
    piece.style.flexGrow = String(part.end_s - part.begin_s);
    piece.style.setProperty("--c", `var(--${colour.get(part.cause) ?? "dim"})`);
    lane.append(piece);
  }
  const causes = table(["cause", "time", "share", ""], account.causes, (cause) => {
    const name = element("span", { className: "key", text: cause.cause });
    name.style.setProperty("--c", `var(--${colour.get(cause.cause)})`);
    return [name, seconds(cause.seconds), `${Math.round(cause.share * 100)} %`, cause.note];
  }, "");
  causes.className = "causes";
  return [element("p", { text: account.sentence }), lane, causes];
}
