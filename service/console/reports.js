// What the pages of a gallery share: where one is, and the way to its other pages; and how pages keep themselves fresh.

import { EVENTS } from "./api.js";
import { fill, h, icon } from "./dom.js";
import { button, heading } from "./ui.js";
import { problem as inWords } from "./words.js";

const PLACES = [
  ["", "People", "people"],
  ["/risk", "Risk", "risk"],
  ["/hygiene", "Hygiene", "hygiene"],
  ["/recognizer", "Recognizer", "move"],
  ["/settings", "Settings", "edit"],
];

/** A gallery's page: its name, and its pages; `here` is this one's, without the slash. */
export function galleryHeading(gallery, here, lead, ...actions) {
  const base = `#/galleries/${encodeURIComponent(gallery)}`;
  const link = ([path, name, picture]) =>
    h(
      "a",
      { class: "tab", href: base + path, "aria-current": path === (here && `/${here}`) ? "page" : null },
      icon(picture),
      name,
    );
  const tabs = h("nav", { class: "tabs", "aria-label": `Pages of ${gallery}` }, PLACES.map(link));
  requestAnimationFrame(() => {
    const current = tabs.querySelector("[aria-current]"); // on a phone with large text it lies beyond the edge
    if (current) tabs.scrollLeft = current.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - current.clientWidth) / 2;
  });
  return h(
    "div",
    { class: "stack" },
    h("a", { class: "back", href: "#/galleries" }, icon("back"), "Galleries"),
    heading(gallery, lead, ...actions),
    tabs,
  );
}

const SOONEST_MS = 1000;
const LATEST_MS = 20_000;

/**
 * Run `look` now and again: a second after it said that something is under way (by returning true), else ever more
 * seldom; not while the tab is hidden. Returns a function to look at once, which has `note`: an element that says since
 * when what is shown was not renewed, and why; nothing while it is, or before there was anything.
 */
export function watch(look, signal) {
  let pause = SOONEST_MS;
  let timer;
  let looking = false;
  let renewed = null;
  const note = h("div", { role: "status" });
  const say = (error) => {
    if (renewed === null) return; // the page has nothing to show, and says so in its place
    const since = `Not renewed since ${renewed.toLocaleTimeString()}, because: ${inWords(error).text}`;
    if (note.querySelector("p")?.textContent === since) return; // said, and read aloud, once
    fill(note, h("div", { class: "notice row" }, icon("warning"), h("p", {}, since), button("Look again", now)));
  };
  const again = async () => {
    clearTimeout(timer);
    if (signal.aborted || document.hidden || looking) return;
    looking = true;
    try {
      pause = (await look()) ? SOONEST_MS : Math.min(LATEST_MS, pause * 1.5);
      renewed = new Date();
      fill(note);
    } catch (error) {
      if (error.name === "AbortError") return;
      say(error);
      // Who is not allowed to is not asking again and again: each refusal stands in the audit.
      if (error.status === 401 || error.status === 403) return;
      pause = LATEST_MS;
    } finally {
      looking = false;
    }
    if (!signal.aborted) timer = setTimeout(again, pause);
  };
  const now = () => ((pause = SOONEST_MS), again());
  document.addEventListener("visibilitychange", now, { signal });
  EVENTS.addEventListener("key", now, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  again();
  return Object.assign(now, { note });
}

/** What was refused, and why. `refusals`: pairs of what it was and its problem. */
export const refusalList = (refusals) =>
  h(
    "ul",
    { class: "refusals" },
    refusals.map(([item, problem]) =>
      h(
        "li",
        {},
        h("code", {}, item),
        h("span", {}, `${problem.title}. `, h("span", { class: "hint" }, problem.detail)),
      ),
    ),
  );
