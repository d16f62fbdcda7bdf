// Stored face crops. They load when they become visible.

import { send, subjectPath, templatePath } from "./api.js";
import { h, icon } from "./dom.js";

/** The stored crop of the person's best photo. */
export const portrait = (gallery, subject, alt, signal) => picture(`${subjectPath(gallery, subject)}/thumbnail`, alt, signal);

/** The stored crop of a photo. */
export const storedPhoto = (gallery, subject, template, alt, signal) => picture(`${templatePath(gallery, subject, template)}/crop`, alt, signal);

/** A thumbnail that stays blank if no crop is stored, or if the key may not read it. */
function picture(path, alt, signal) {
  const place = h("span", { class: "thumb-place" }, h("span", { class: "thumb blank", "aria-hidden": "true" }, icon("enroll")));
  const watch = new IntersectionObserver(async (entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watch.disconnect();
    const response = await send("GET", path, { signal }).catch(() => null);
    if (response === null) return;
    const url = URL.createObjectURL(await response.blob());
    place.replaceChildren(h("img", { class: "thumb", src: url, alt, onLoad: () => URL.revokeObjectURL(url) }));
  });
  watch.observe(place);
  signal?.addEventListener("abort", () => watch.disconnect(), { once: true });
  return place;
}
