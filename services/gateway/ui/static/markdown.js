// Markdown to elements. The text is a model's: HTML in it is shown as text, and links lead only to web and mail.

import { element } from "/ui/dom.js";
import { lexer } from "/ui/vendor/marked.esm.js";

const SAFE = /^(https?:|mailto:)/i;

/** Elements for `text`. */
export function markdown(text) { return blocks(lexer(text)); }

function blocks(tokens) { return tokens.map(block).filter(Boolean); }

function block(token) {
  switch (token.type) {
    case "space": case "def": return null;
    case "heading": return element(`h${Math.min(token.depth + 2, 6)}`, {}, ...inlines(token.tokens));
    case "paragraph": return element("p", {}, ...inlines(token.tokens));
    case "code": return element("pre", {}, element("code", { text: token.text }));
    case "blockquote": return element("blockquote", {}, ...blocks(token.tokens));
    case "hr": return element("hr");
    case "list": {
      const made = element(token.ordered ? "ol" : "ul", {}, ...token.items.map((item) => element("li", {}, ...blocks(item.tokens))));
      if (token.ordered && token.start !== 1) made.start = token.start;
      return made;
    }
    case "table": {
      const row = (cells, tag) => element("tr", {}, ...cells.map((cell) => element(tag, {}, ...inlines(cell.tokens))));
      return element("div", { className: "table" }, element("table", {},
        element("thead", {}, row(token.header, "th")), element("tbody", {}, ...token.rows.map((cells) => row(cells, "td")))));
    }
    case "text": return token.tokens ? element("span", {}, ...inlines(token.tokens)) : element("span", { text: plain(token.text) });
    case "checkbox": return inline(token);
    default: return element("p", { text: token.raw });
  }
}

function inlines(tokens = []) { return tokens.map(inline); }

function inline(token) {
  switch (token.type) {
    case "strong": case "em": case "del": return element(token.type, {}, ...inlines(token.tokens));
    case "codespan": return element("code", { text: token.text });
    case "br": return element("br");
    case "escape": return document.createTextNode(token.text);
    case "text": return token.tokens ? element("span", {}, ...inlines(token.tokens)) : document.createTextNode(plain(token.text));
    case "link": {
      if (!SAFE.test(token.href)) return document.createTextNode(token.raw);
      const made = element("a", { title: token.href }, ...inlines(token.tokens));
      made.href = token.href;
      made.rel = "noreferrer noopener";
      made.target = "_blank";
      return made;
    }
    case "checkbox": return document.createTextNode(token.checked ? "☑ " : "☐ ");
    default: return document.createTextNode(token.raw);
  }
}

const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'" };
/** Text with its HTML entities decoded, as Markdown has it outside of code. */
function plain(text) { return text.replace(/&(amp|lt|gt|quot|#39);/g, (_, name) => NAMED[name]); }
