// What both pages keep in this tab: the key and the theme, from the address or as set before.

const store = {
  get: (name) => { try { return sessionStorage.getItem(name); } catch { return null; } },
  set: (name, value) => { try { sessionStorage.setItem(name, value); } catch { /* private mode */ } },
};
const fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.get("key")) {
  store.set("key", fragment.get("key"));
  history.replaceState(null, "", location.pathname);
}
export const key = () => store.get("key") ?? "";
export function setKey(value) { store.set("key", value.trim()); }

/** A header with the key, or none. */
export const authorization = () => (key() ? { authorization: `Bearer ${key()}` } : {});

/** The JSON at `path`. Throws an Error with the server's sentence and `status`. */
export async function ask(path) {
  const response = await fetch(path, { headers: authorization(), cache: "no-store" });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw Object.assign(new Error(body.error?.message ?? `status ${response.status}`), { status: response.status });
  return body;
}

const root = document.documentElement;
root.dataset.theme = fragment.get("theme") ?? store.get("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

/** Lets `button` switch between light and dark; `onChange` redraws what has colours of its own. */
export function theme(button, onChange = () => {}) {
  button.addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    store.set("theme", root.dataset.theme);
    onChange();
  });
}

/** A JSON value of this tab under `name`; null where there is none. */
export function kept(name) { try { return JSON.parse(store.get(name)); } catch { return null; } }
export function keep(name, value) { store.set(name, JSON.stringify(value)); }
