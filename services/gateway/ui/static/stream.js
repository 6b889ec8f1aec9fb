// The stream of pictures: server-sent events read by fetch, which, unlike EventSource, can send a key.

const FIRST_WAIT_MS = 500, LONGEST_WAIT_MS = 8000, SILENCE_MS = 6000;

/** Splits text that arrives in pieces into events; calls `onEvent(kind, data)` for each that is whole. */
export function eventReader(onEvent) {
  let rest = "";
  return (piece) => {
    rest += piece;
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const lines = rest.slice(0, end).split("\n");
      rest = rest.slice(end + 2);
      const of = (name) => lines.filter((line) => line.startsWith(name + ":"))
        .map((line) => line.slice(name.length + 1).replace(/^ /, "")).join("\n");
      const data = of("data");
      if (data) onEvent(of("event"), data);
    }
  };
}

/** Reads `url` for ever, again after every end. `onState("live" | "away" | "key", text)` says how it is. */
export async function follow(url, key, onEvent, onState) {
  let wait = FIRST_WAIT_MS;
  for (;;) {
    const abort = new AbortController();
    let timer = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const headers = key() ? { authorization: `Bearer ${key()}` } : {};
      const response = await fetch(url, { headers, signal: abort.signal, cache: "no-store" });
      if (response.status === 401 || response.status === 403) {
        const body = await response.json().catch(() => ({}));
        onState("key", body.error?.message ?? "this page needs a key");
        return;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      onState("live", "");
      wait = FIRST_WAIT_MS;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      const feed = eventReader(onEvent);
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENCE_MS);
        feed(value);
      }
      onState("away", "the stream ended");
    } catch (error) {
      onState("away", error.name === "AbortError" ? "nothing heard" : error.message);
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 2, LONGEST_WAIT_MS);
  }
}
