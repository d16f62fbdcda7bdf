// Stored face crops, and faces side by side. Crops load when they become visible; the audit log records each access.

import { galleryPath, part, send, subjectPath, templatePath } from "./api.js";
import { h, icon } from "./dom.js";

/** The stored crop of the person's best photo. */
export const portrait = (gallery, subject, alt, signal) => picture(`${subjectPath(gallery, subject)}/thumbnail`, alt, signal);

/** The stored crop of a photo. */
export const storedPhoto = (gallery, subject, template, alt, signal) => picture(`${templatePath(gallery, subject, template)}/crop`, alt, signal);

/** The stored crop of a stranger. */
export const strangerPicture = (gallery, id, alt, signal) => picture(`${galleryPath(gallery)}/strangers/${part(id)}/thumbnail`, alt, signal);

/** A thumbnail that stays blank, with the reason, if no crop is stored or the key may not read it. */
function picture(path, alt, signal) {
  const blank = h("span", { class: "thumb blank", "aria-hidden": "true" }, icon("enroll"));
  const place = h("span", { class: "thumb-place" }, blank);
  const watch = new IntersectionObserver(async (entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watch.disconnect();
    const response = await send("GET", path, { signal }).catch((error) => error);
    if (response instanceof Error) {
      blank.title = response.status === 403 ? "This key cannot read pictures." : "No stored picture.";
      return;
    }
    const url = URL.createObjectURL(await response.blob());
    place.replaceChildren(h("img", { class: "thumb", src: url, alt, onLoad: () => URL.revokeObjectURL(url) }));
  });
  watch.observe(place);
  signal?.addEventListener("abort", () => watch.disconnect(), { once: true });
  return place;
}

/** Faces side by side. `faces`: pairs of caption and picture. */
export const sides = (faces) =>
  h(
    "div",
    { class: "sides" },
    faces.map(([caption, face]) => h("figure", {}, face, h("figcaption", { class: "hint" }, caption))),
  );

/** A hint how to store pictures in a gallery that stores none. */
export const keepHint = (gallery) =>
  h(
    "p",
    { class: "hint" },
    `“${gallery}” stores no pictures to compare. For new photos, turn on “Keep a small picture of each enrolled face” in its `,
    h("a", { href: `#/galleries/${encodeURIComponent(gallery)}/settings` }, "settings"),
    ".",
  );
