// The first line: is anything wrong?

import { clock, byId, element, say } from "/ui/dom.js";

let stated = ["warn", "connecting"], isStill = false;

/** Says in the first line how it is: `how` is good, warn or bad. */
export function state(how, text) {
  stated = [how, text];
  document.querySelector(".dot").className = `dot ${how}`;
  say(byId("state-text"), isStill ? `held still; ${text}` : text);
}

/** Says that the page is held still, or no longer. */
export function holdStill(now) { isStill = now; state(...stated); }

/** What is wrong or in the way, the worst first: `[how, sentence]`. */
function findings({ fleet, totals }) {
  const wrong = [...fleet.unready, ...fleet.troubles];
  if (!fleet.scheduler && !wrong.length) wrong.push("no scheduler is heard of");
  const notes = (fleet.short_of ?? []).map((text) => `short of ${text}`);
  if (fleet.uncached?.length) notes.push(`the prefix cache is off at ${fleet.uncached.length === totals.workers ? "every worker" : fleet.uncached.join(", ")}`);
  return [...wrong.map((text) => ["bad", text]), ...notes.map((text) => ["warn", text])];
}

/** The verdict on the whole stack, in the first line, and its reasons below. */
export function showVerdict(picture) {
  const found = findings(picture), wrong = found.filter(([how]) => how === "bad").length;
  byId("reasons").hidden = !found.length;
  byId("reason-rows").replaceChildren(...found.map(([how, text]) => element("li", { className: how, text })));
  const { workers } = picture.totals;
  if (wrong) state("bad", `not well: ${found[0][1]}${wrong > 1 ? `, and ${wrong - 1} more` : ""}`);
  else if (found.length) state("warn", `well, but ${found[0][1]}`);
  else state("good", `well: ${workers} ${workers === 1 ? "worker answers" : "workers answer"}, short of nothing`);
  say(byId("release"), picture.release ? `Kvasir ${picture.release}, ${picture.fleet.scheduler ?? "no scheduler"}, policy ${picture.fleet.policy}. This gateway has run since ${clock(picture.unix_s - picture.up_s)}.` : "");
}
