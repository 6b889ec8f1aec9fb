// Small helpers: elements from data, never markup from strings.

export const byId = (id) => document.getElementById(id);

export function element(tag, { text, title, className, onClick } = {}, ...children) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (title) made.title = title;
  if (className) made.className = className;
  if (onClick) made.addEventListener("click", onClick);
  made.append(...children);
  return made;
}

/** An element of SVG. */
export function drawn(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/** Sets text only where it changed, so that selections and readers are left alone. */
export function say(node, text) { if (node.textContent !== text) node.textContent = text; }

/** For what a service of another release does not say. */
export const UNKNOWN = "–";
const known = (write) => (number) => (Number.isFinite(number) ? write(number) : UNKNOWN);
export const gigabytes = known((mebibytes) => `${(mebibytes / 1024).toFixed(mebibytes < 10240 ? 1 : 0)} GiB`);
export const percent = known((share) => `${Math.round(share * 100)} %`);
export const count = known((number) => (number >= 1e6 ? `${(number / 1e6).toFixed(1)}M` : number >= 1e4 ? `${Math.round(number / 1e3)}k` : String(Math.round(number))));
export const seconds = known((length) => (length < 0.001 ? "0 ms" : length < 1 ? `${Math.round(length * 1000)} ms` : length < 100 ? `${length.toFixed(1)} s` : `${Math.round(length)} s`));
export const tenths = known((number) => number.toFixed(1));
export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour12: false });
export const short = (id) => (!id ? UNKNOWN : id.length > 14 ? `${id.slice(0, 12)}…` : id);

/** Rows of a table body, made anew; a sentence where there are none. */
export function rows(body, items, make, empty) {
  if (!items.length) {
    const width = body.parentElement.querySelectorAll("th").length;
    const cell = element("td", { text: empty, className: "empty" });
    cell.colSpan = width;
    body.replaceChildren(element("tr", {}, cell));
    return;
  }
  body.replaceChildren(...items.map((item, index) => element("tr", {}, ...make(item, index).map((cell) =>
    cell instanceof Node ? element("td", {}, cell) : element("td", { text: String(cell ?? UNKNOWN) })))));
}
