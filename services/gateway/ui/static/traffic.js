// The chat box: one question, as often as asked, all at once; the first answer is shown as it comes.

import { complete } from "/ui/completions.js";
import { byId, say } from "/ui/dom.js";
import { ask, key } from "/ui/session.js";

export class Traffic {
  constructor() {
    this.abort = null;
    byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); this.send(); }
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
  }

  async send() {
    const question = byId("question").value.trim() || "Tell me a long story about the sea.";
    if (this.abort) return;
    if (!key()) { say(byId("chat-note"), "chats need a key: open the page on the gateway's own port, with the key behind #key="); return; }
    this.abort = new AbortController();
    byId("send").disabled = true; byId("stop").disabled = false;
    byId("answer").textContent = "";
    const times = Math.max(1, Math.min(64, Number(byId("times").value) || 1));
    let tokens = 0, done = 0, failed = "";
    const began = performance.now();
    const note = () => say(byId("chat-note"), `${done} of ${times} answered, ${tokens} pieces, ${((performance.now() - began) / 1000).toFixed(1)} s${failed ? `; ${failed}` : ""}`);
    const one = async (index) => {
      try {
        const model = (await ask("/v1/models")).data[0].id;
        const body = { model, seed: index, max_tokens: Number(byId("most").value) || 120, messages: [{ role: "user", content: question }] };
        await complete(body, (event) => {
          const text = event.choices?.[0]?.delta?.content;
          if (!text) return;
          tokens += 1;
          if (index === 0) byId("answer").append(text);
          note();
        }, this.abort.signal);
      } catch (error) { failed = error.name === "AbortError" ? "stopped" : error.message; }
      done += 1; note();
    };
    await Promise.all(Array.from({ length: times }, (_, index) => one(index)));
    this.abort = null;
    byId("send").disabled = false; byId("stop").disabled = true;
  }
}
