// One streamed chat completion.

import { authorization } from "/ui/session.js";
import { eventReader } from "/ui/stream.js";

/** Posts `body` and calls `onEvent` with each chunk; returns the request's id. Throws an Error with the server's
 * sentence and `status`. */
export async function complete(body, onEvent, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: { ...authorization(), "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }), signal });
  if (!response.ok) {
    const told = await response.json().catch((error) => { if (error.name === "AbortError") throw error; return {}; });
    throw Object.assign(new Error(told.error?.message ?? `status ${response.status}`), { status: response.status });
  }
  const feed = eventReader((_, data) => {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    onEvent(event);
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) { const { value, done } = await reader.read(); if (done) break; feed(value); }
  return response.headers.get("x-kvasir-request-id");
}
