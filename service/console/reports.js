// What the pages of a gallery's numbers share: where one is, and the way to its other pages.

import { h, icon } from "./dom.js";
import { heading } from "./ui.js";

const PLACES = [
  ["", "People", "people"],
  ["/risk", "Risk", "risk"],
  ["/hygiene", "Hygiene", "hygiene"],
];

/** A gallery's page: its name, and its pages; `here` is this one's, without the slash. */
export function galleryHeading(gallery, here, lead) {
  const base = `#/galleries/${encodeURIComponent(gallery)}`;
  const link = ([path, name, picture]) =>
    h(
      "a",
      { class: "tab", href: base + path, "aria-current": path === (here && `/${here}`) ? "page" : null },
      icon(picture),
      name,
    );
  return h(
    "div",
    { class: "stack" },
    h("a", { class: "back", href: "#/galleries" }, icon("back"), "Galleries"),
    heading(gallery, lead),
    h("nav", { class: "tabs", "aria-label": `Pages of ${gallery}` }, PLACES.map(link)),
  );
}
