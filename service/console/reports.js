// Shared parts of pages: headings with navigation, periodic refresh, and lists of refused items.

import { galleryPage } from "./api.js";
import { each, fill, h, icon } from "./dom.js";
import { button, heading, loading, problemBox, waiting } from "./ui.js";
import { mayPass, problem as inWords } from "./words.js";

const OF_GALLERY = [
  ["", "People", "people"],
  ["/risk", "Risk", "risk"],
  ["/hygiene", "Hygiene", "hygiene"],
  ["/albums", "Albums", "photo"],
  ["/settings", "Settings", "edit"],
];
const OF_SERVICE = [
  ["/keys", "API keys", "key"],
  ["/audit", "Audit", "docs"],
  ["/webhooks", "Webhooks", "upload"],
];

/** Links to related pages. `here`: the path of this page, without the slash. */
function tabsOf(places, base, here, label) {
  const current = (path) => (path === (here && `/${here}`) ? "page" : null);
  const link = ([path, name, picture]) =>
    h("a.tab", { href: base + path, "aria-current": current(path) }, [icon(picture), name]);
  const tabs = h("nav.tabs", { "aria-label": label }, places.map(link));
  requestAnimationFrame(() => {
    const current = tabs.querySelector("[aria-current]"); // on a phone with large text it can be outside the view
    if (current) tabs.scrollLeft = current.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - current.clientWidth) / 2;
  });
  return tabs;
}

/** The heading of a gallery page with links to the others. `here`: the path of this page, without the slash. */
export const galleryHeading = (gallery, here, lead, ...actions) =>
  h("div.stack", [
    h("a.back", { href: "#/galleries" }, [icon("back"), "Galleries"]),
    heading(gallery, lead, ...actions),
    tabsOf(OF_GALLERY, galleryPage(gallery), here, `Pages of ${gallery}`),
  ]);

/** The heading of a page under Settings. */
export const settingsHeading = (here, lead, ...actions) =>
  h("div.stack", [heading("Settings", lead, ...actions), tabsOf(OF_SERVICE, "#/settings", here, "Settings")]);

/** A list that grows by pages. `ask(cursor)` returns a page of the API, and `shown(data)` its elements; `nothing` stands for an
 * empty list. */
export function pages(ask, shown, nothing) {
  const place = h("div.stack");
  const load = async (cursor) => {
    const { data, next } = await ask(cursor);
    place.lastElementChild?.matches(".actions") && place.lastElementChild.remove();
    if (data.length === 0 && !cursor) return nothing;
    place.append(shown(data));
    if (next) place.append(h("div.actions", [button("Show more", () => load(next))]));
    return place;
  };
  return loading(() => load(null));
}

const MIN_PAUSE_MS = 1000;
const MAX_PAUSE_MS = 20_000;

/**
 * Call `look` periodically: one second after it returned true (work in progress), otherwise with growing pauses, and not
 * while the tab is hidden. Returns a function to refresh at once. Its `note` is an element that reports since when the
 * refresh fails, and why. `place`: shows the error of the first call.
 */
export function watch(look, signal, place) {
  let pause = MIN_PAUSE_MS;
  let timer;
  let looking = false;
  let renewed = null;
  const note = h("div", { role: "status" });
  const say = (error) => {
    if (renewed === null && place) {
      const focused = place.contains(document.activeElement); // the button that is replaced
      fill(place, problemBox(error, mayPass(error) && now));
      if (focused) place.querySelector("button")?.focus();
    }
    if (renewed === null) return; // the page itself shows the first error
    const since = `Not updated since ${renewed.toLocaleTimeString()}: ${inWords(error).text}`;
    if (note.querySelector("p")?.textContent === since) return; // announce it once
    fill(note, h("div.notice.row", [icon("warning"), h("p", since), button("Refresh", now)]));
  };
  const again = async () => {
    clearTimeout(timer);
    if (signal.aborted || document.hidden || looking) return;
    looking = true;
    try {
      pause = (await look()) ? MIN_PAUSE_MS : Math.min(MAX_PAUSE_MS, pause * 1.5);
      renewed = new Date();
      fill(note);
    } catch (error) {
      if (error.name === "AbortError") return;
      say(error);
      // Do not repeat forbidden requests: the audit log records each refusal.
      if (error.status === 401 || error.status === 403) return;
      pause = MAX_PAUSE_MS;
    } finally {
      looking = false;
    }
    if (!signal.aborted) timer = setTimeout(again, pause);
  };
  const now = () => ((pause = MIN_PAUSE_MS), again());
  document.addEventListener("visibilitychange", now, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  again();
  return Object.assign(now, { note });
}

/**
 * A list that renews itself, in `elements`; `look()` renews it at once. `load` resolves to the items. `card(one)` returns the
 * element of an item. It stays while the item stays the same, so that it keeps the focus; after a change its `update(one)`
 * shows it, if it has one, otherwise another card. `nothing()` stands for an empty list. `busy(one)`: the item changes soon.
 */
export function renewedList(tag, load, card, nothing, signal, { name = "id", busy = () => false, after } = {}) {
  const list = h(tag);
  const body = h("div", waiting());
  const made = new Map(); // text and element by name
  let blank = null;

  function cardOf(one) {
    const text = JSON.stringify(one);
    const known = made.get(one[name]);
    if (known?.text === text) return known.element;
    const element = known?.element.update ? known.element : card(one);
    element.update?.(one);
    made.set(one[name], { text, element });
    return element;
  }

  const show = async () => {
    const items = await load();
    const wanted = items.map(cardOf);
    if (wanted.length !== list.children.length || wanted.some((element, i) => element !== list.children[i]))
      fill(list, wanted);
    const shown = items.length === 0 ? (blank ??= nothing()) : list;
    if (shown.parentElement !== body) fill(body, shown, shown === list && after);
    return items.some(busy);
  };
  const look = watch(show, signal, body);
  return { look, elements: [look.note, body] };
}

/** A list of refused items and reasons. `refusals`: pairs of item and problem. */
export const refusalList = (refusals) =>
  each("ul.refusals", refusals, ([item, problem]) =>
    h("li", [h("code", item), h("span", [`${inWords(problem).text} `, h("span.hint", inWords(problem).remedy)])]),
  );
