// The chat: turns of one conversation, kept in this tab, each answer with how fast it came.

import { complete } from "/ui/completions.js";
import { Details } from "/ui/details.js";
import { byId, element, say, seconds, tenths } from "/ui/dom.js";
import { markdown } from "/ui/markdown.js";
import { ask, keep, kept, key, setKey, theme } from "/ui/session.js";

const FIELDS = ["model", "system", "temperature", "most"];
const EVERY_MS = 60;  // between two drawings of an answer that is coming

const details = new Details(ask);
let turns = kept("turns") ?? [];
/** Of the answer that is coming. */
let abort = null;

theme(byId("theme"));

// --- what a request says

/** The body of the request whose answer is turn `end`. */
function bodyBefore(end) {
  const system = byId("system").value.trim();
  const messages = turns.slice(0, end).filter((turn) => turn.role === "user" || turn.text)
    .map((turn) => ({ role: turn.role, content: turn.text }));
  const body = { model: byId("model").value, messages: system ? [{ role: "system", content: system }, ...messages] : messages };
  if (byId("temperature").value !== "") body.temperature = Number(byId("temperature").value);
  if (byId("most").value !== "") body.max_tokens = Number(byId("most").value);
  return body;
}

const URL_OF_API = `${location.origin}/v1`;

function asCurl(body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${URL_OF_API}/chat/completions \\\n  -H "Authorization: Bearer $OPENAI_API_KEY" \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'\n`;
}

function asPython(body) {
  const words = Object.entries(body).map(([name, value]) => `    ${name}=${JSON.stringify(value, null, 4).replaceAll("\n", "\n    ")},\n`).join("");
  return `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${URL_OF_API}", api_key=os.environ["OPENAI_API_KEY"])\n`
    + `answer = client.chat.completions.create(\n${words})\nprint(answer.choices[0].message.content)\n`;
}

async function copy(text, what) {
  try { await navigator.clipboard.writeText(text); say(byId("note"), `copied as ${what}; it reads the key from $OPENAI_API_KEY`); }
  catch { say(byId("note"), "this browser does not let the page copy"); }
}

// --- turns

function figures(turn) {
  const words = [];
  if (turn.first_s !== undefined) words.push(`first token after ${seconds(turn.first_s)}`);
  if (turn.tokens > 1 && turn.rest_s > 0) words.push(`${tenths((turn.tokens - 1) / turn.rest_s)} tokens/s`);
  if (turn.tokens) words.push(`${turn.tokens} tokens`);
  if (turn.cached) words.push(`${turn.cached} of ${turn.prompt} prompt tokens cached`);
  if (turn.reason === "length") words.push("cut at the most tokens");
  return words.join(" · ");
}

const button = (text, onClick) => element("button", { text, onClick });

function drawn(turn, index) {
  const words = element("div", { className: "words" });
  const below = element("div", { className: "below" });
  const item = element("li", { className: turn.role }, words, below);
  if (turn.role === "user") {
    words.textContent = turn.text;
    below.append(button("Edit", () => edit(item, turn, index)));
    return item;
  }
  words.append(...markdown(turn.text));
  if (turn.failed) words.append(element("p", { className: "failed", text: turn.failed }));
  if (abort && index === turns.length - 1) { item.setAttribute("aria-busy", "true"); return item; }
  below.append(element("span", { text: figures(turn) }), button("Ask again", () => again(index)));
  if (turn.request) below.append(button("Where did the time go?", () => details.request(turn.request)));
  below.append(button("Copy as curl", () => copy(asCurl(bodyBefore(index)), "curl")), button("Copy as Python", () => copy(asPython(bodyBefore(index)), "Python")));
  return item;
}

function draw() {
  byId("turns").replaceChildren(...turns.map(drawn));
  byId("empty").hidden = turns.length > 0;
  byId("send").hidden = abort !== null;
  byId("stop").hidden = abort === null;
}

function redrawLast() {
  const isAtEnd = window.innerHeight + window.scrollY >= document.body.scrollHeight - 80;
  byId("turns").lastElementChild.replaceWith(drawn(turns.at(-1), turns.length - 1));
  if (isAtEnd) window.scrollTo(0, document.body.scrollHeight);
}

function edit(item, turn, index) {
  if (abort) return;
  const words = element("textarea", { className: "edit" });
  words.value = turn.text;
  words.rows = Math.min(12, turn.text.split("\n").length + 1);
  words.setAttribute("aria-label", "Your message");
  const send = () => {
    if (!words.value.trim()) return;
    turns = [...turns.slice(0, index), { role: "user", text: words.value.trim() }];
    answer();
  };
  onEnter(words, send);
  item.replaceChildren(words, element("div", { className: "below" }, button("Send", send), button("Leave as it was", draw)));
  words.focus();
}

function again(index) {
  if (abort) return;
  turns = turns.slice(0, index);
  answer();
}

/** Asks for an answer to the turns so far. */
async function answer() {
  const body = { ...bodyBefore(turns.length), stream_options: { include_usage: true } };
  const turn = { role: "assistant", text: "" };
  turns.push(turn);
  abort = new AbortController();
  say(byId("note"), "");
  draw();
  window.scrollTo(0, document.body.scrollHeight);
  const began = performance.now();
  let first = 0, timer = 0;
  try {
    turn.request = await complete(body, (event) => {
      const choice = event.choices?.[0];
      if (choice?.delta?.content) {
        first ||= performance.now();
        turn.first_s = (first - began) / 1000;
        turn.rest_s = (performance.now() - first) / 1000;
        turn.text += choice.delta.content;
        timer ||= setTimeout(() => { timer = 0; redrawLast(); }, EVERY_MS);
      }
      if (choice?.finish_reason) turn.reason = choice.finish_reason;
      if (event.usage) {
        turn.tokens = event.usage.completion_tokens;
        turn.prompt = event.usage.prompt_tokens;
        turn.cached = event.usage.prompt_tokens_details?.cached_tokens ?? 0;
      }
    }, abort.signal);
  } catch (error) {
    if (error.name === "AbortError") turn.failed = "stopped";
    else turn.failed = error.message;
    if (error.status === 401) needKey(error.message);
  }
  clearTimeout(timer);
  abort = null;
  keep("turns", turns);
  draw();
  byId("question").focus();
}

// --- the form

function onEnter(area, act) {
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); act(); }
  });
}

function send() {
  const text = byId("question").value.trim();
  if (!text || abort || !byId("model").value) return;
  byId("question").value = "";
  turns.push({ role: "user", text });
  answer();
}

byId("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
onEnter(byId("question"), send);
byId("stop").addEventListener("click", () => abort?.abort());
byId("new").addEventListener("click", () => {
  if (abort) return;
  turns = [];
  keep("turns", turns);
  draw();
  byId("question").focus();
});

const fields = kept("fields") ?? {};
for (const name of FIELDS) {
  if (fields[name] && name !== "model") byId(name).value = fields[name];
  byId(name).addEventListener("change", () => { fields[name] = byId(name).value; keep("fields", fields); });
}

// --- the key and the models

function needKey(text) {
  byId("key-form").hidden = false;
  say(byId("key-text"), text);
  byId("key").focus();
}

async function begin() {
  byId("key-form").hidden = true;
  try {
    const models = (await ask("/v1/models")).data.map((each) => each.id);
    byId("model").replaceChildren(...models.map((id) => element("option", { text: id })));
    if (models.includes(fields.model)) byId("model").value = fields.model;
    say(byId("note"), models.length ? "" : "no worker serves a model yet; load this page again in a moment");
    document.body.dataset.ready = String(models.length);
    byId("question").focus();
  } catch (error) {
    if (error.status === 401 || error.status === 403) needKey(key() ? error.message : "this page needs the API key that `make up` prints");
    else say(byId("note"), `not connected (${error.message}); load this page again`);
  }
}
byId("key-form").addEventListener("submit", (event) => { event.preventDefault(); setKey(byId("key").value); begin(); });

draw();
begin();
