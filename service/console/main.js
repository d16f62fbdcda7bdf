// The shell: routing, navigation and API key.

import { EVENTS, KEY, call, key, setKey } from "./api.js";
import { ask, closeDialogs, dialog } from "./dialogs.js";
import { fill, h, icon } from "./dom.js";
import { clearDesk } from "./photo.js";
import { storageName } from "./store.js";
import { field, refused, ticked } from "./forms.js";
import { button, heading, linkButton, problemBox } from "./ui.js";
import * as album from "./pages/album.js";
import * as albums from "./pages/albums.js";
import * as audit from "./pages/audit.js";
import * as compare from "./pages/compare.js";
import * as galleries from "./pages/galleries.js";
import * as gallery from "./pages/gallery.js";
import * as health from "./pages/health.js";
import * as hygiene from "./pages/hygiene.js";
import * as identify from "./pages/identify.js";
import * as jobs from "./pages/jobs.js";
import * as keys from "./pages/keys.js";
import * as enroll from "./pages/enroll.js";
import * as risk from "./pages/risk.js";
import * as settings from "./pages/settings.js";
import * as subject from "./pages/subject.js";
import * as webhooks from "./pages/webhooks.js";

// A page is a module with `title(params)` and `render(params, signal)`, which returns an element. `signal` is aborted when
// another page opens. Path segments that start with ":" are params.
const PAGES = [
  ["/identify", identify],
  ["/enroll", enroll],
  ["/compare", compare],
  ["/galleries", galleries],
  ["/galleries/:gallery", gallery],
  ["/galleries/:gallery/albums", albums],
  ["/galleries/:gallery/albums/:album", album],
  ["/galleries/:gallery/risk", risk],
  ["/galleries/:gallery/hygiene", hygiene],
  ["/galleries/:gallery/settings", settings],
  ["/galleries/:gallery/subjects/:subject", subject],
  ["/jobs", jobs],
  ["/health", health],
  ["/settings/keys", keys],
  ["/settings/audit", audit],
  ["/settings/webhooks", webhooks],
];
const PLACES = [
  ["/identify", "Identify", "search"],
  ["/enroll", "Enroll", "enroll"],
  ["/compare", "Compare", "compare"],
  ["/galleries", "Galleries", "gallery"],
  ["/jobs", "Jobs", "jobs"],
  ["/health", "Health", "health"],
];
const main = document.getElementById("main");
let leaving = new AbortController();
let worked = false; // the page has unsaved input

function matched(path) {
  for (const [pattern, page] of PAGES) {
    const found = new RegExp(`^${pattern.replaceAll(/:(\w+)/g, "(?<$1>[^/]+)")}$`).exec(path);
    if (!found) continue;
    try {
      const params = Object.entries(found.groups ?? {}).map(([name, text]) => [name, decodeURIComponent(text)]);
      return [page, Object.fromEntries(params)];
    } catch {
      return null; // invalid percent encoding
    }
  }
  return null;
}

function show(focus = true) {
  closeDialogs();
  leaving.abort();
  worked = false;
  leaving = new AbortController();
  const [path, query] = (location.hash.slice(1) || "/identify").split("?");
  markPlace(path);
  let content;
  try {
    const [page, params] = matched(path) ?? [null, {}];
    if (page === null) {
      document.title = "Page not found · Kith";
      const text = "The address may be incomplete, or from another version.";
      content = h("div.page", [
        heading("Page not found", text),
        h("div.actions", linkButton("Go to the start page", "#/identify")),
      ]);
    } else {
      Object.assign(params, Object.fromEntries(new URLSearchParams(query)));
      document.title = `${page.title(params)} · Kith`;
      content = page.render(params, leaving.signal);
    }
  } catch (error) {
    content = problemBox(error, () => show());
  }
  fill(main, content);
  if (focus) {
    scrollTo(0, 0);
    const first = main.querySelector("h1") ?? main; // screen readers announce the new page
    first.tabIndex = -1;
    first.focus({ preventScroll: true });
  }
}

/** React to a new or removed key. A new key keeps a page with unsaved input. Without a key all loaded data is removed. */
function rekeyed() {
  if (key() === null) {
    clearDesk();
    closeDialogs({ key: true });
  }
  if (key() === null || !worked) show(false);
}

function markPlace(path) {
  for (const link of document.querySelectorAll("[data-path]")) {
    const here = path === link.dataset.path || path.startsWith(`${link.dataset.path}/`);
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

/** The public part of a key: its id in `kith keys list`. */
const keyName = (token) => /^kith_([0-9a-f]{12})_/.exec(token)?.[1] ?? "the operator’s key";

/** A dialog about the key, which an open service does not need. */
async function showKey() {
  const open = key() === null && (await call("GET", "/v1/galleries", { query: { limit: 1 } }).catch(() => null));
  if (!open) return askForKey();
  const text =
    "This service has no API keys, so it needs none. After the first key is created, each request needs one.";
  const close = button("Close", () => box.close(), { kind: "primary" });
  const manage = linkButton("Manage keys", "#/settings/keys");
  const box = dialog("Your key", h("p", text), h("div.actions.end", [manage, close]));
}

function askForKey(problem) {
  if (document.querySelector("dialog.key")) return;
  const input = h("input", {
    type: "password",
    autocomplete: "off",
    spellcheck: false,
    required: true,
    pattern: "\\s*[!-~]+\\s*", // the characters that a header can carry
    title: "Letters, digits and symbols, without spaces",
  });
  const remember = h("input", { type: "checkbox" });
  const wrong = "The service does not accept this key. It is mistyped, revoked or expired.";
  const elements = [
    problem && key() && refused(wrong),
    h("p", "This service needs an API key. Ask its operator for one."),
    problem && worked && h("p.hint", "The page keeps your input. Then repeat what was refused."),
    !problem && key() && h("p.hint", ["In use: ", h("code", keyName(key()))]),
    field("Key", input, "This tab keeps it until you close it."),
    ticked(remember, "Remember it on this computer"),
  ];
  const box = ask("Your key", "Use this key", elements, () => setKey(input.value.trim(), remember.checked));
  const forget = button("Forget the key", () => (setKey(null), box.close()));
  if (key()) box.go.parentElement.prepend(forget);
  box.classList.add("key", "stays");
}

const place = ([path, name, picture]) =>
  h("a", { href: `#${path}`, dataset: { path } }, [icon(picture), h("span", name)]);
fill(document.querySelector(".places"), PLACES.map(place));
const quiet = { kind: "quiet" };
fill(
  document.querySelector(".rail-foot"),
  linkButton("Settings", "#/settings/keys", { ...quiet, icon: "settings", dataset: { path: "/settings" } }),
  button("Your key", showKey, { ...quiet, icon: "key" }),
  linkButton("API reference", "docs", { ...quiet, icon: "docs" }),
);
EVENTS.addEventListener("refused", ({ problem }) => askForKey(problem));
EVENTS.addEventListener("key", rekeyed);
EVENTS.addEventListener("work", () => (worked = true));
for (const name of ["input", "change"])
  addEventListener(name, (event) => (worked ||= !event.target.closest?.("dialog.key")));
addEventListener("hashchange", () => show());
// Another tab stored or removed a key.
addEventListener("storage", (event) => event.key === storageName(KEY) && EVENTS.dispatchEvent(new Event("key")));
// A photo dropped elsewhere must not replace the console.
for (const name of ["dragover", "drop"])
  addEventListener(name, (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
show(false);
