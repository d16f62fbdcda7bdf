// Stored face crops, and faces side by side. The audit records each request for crops, so that pages ask for many at once.

import { call, galleryPage, galleryPath } from "./api.js";
import { each, h, icon } from "./dom.js";

const AT_ONCE = 200; // limit of the service

/** The stored crops of a gallery for one visit of a page. Those that were made together load together, when one of them
 * becomes visible, and each loads once. */
export class Pictures {
  #gallery;
  #signal;
  #batch = null; // of the pictures that are not requested yet
  #loads = new Map(); // load of each picture, by its JSON
  #places = new Map(); // elements of `once`

  constructor(gallery, signal) {
    this.#gallery = gallery;
    this.#signal = signal;
  }

  /** A thumbnail of a crop as POST /crops names it: `{subject}` (the best photo), `{subject, template}`, `{stranger}` or
   * `{album, face}`. It stays blank, with the reason, if no crop is stored or the key may not read it. */
  of(whose, alt) {
    const blank = h("span.thumb.blank", { "aria-hidden": "true" }, icon("enroll"));
    const place = h("span.thumb-place", blank);
    const load = this.#load(whose);
    whenVisible(place, this.#signal, async () => {
      const image = await load().catch((error) => error);
      if (image instanceof Error || image === null) {
        const why = image?.status === 403 ? "This key cannot read pictures." : "The picture could not be loaded.";
        blank.title = image === null ? "No stored picture." : why;
        return;
      }
      const url = URL.createObjectURL(image);
      place.replaceChildren(h("img.thumb", { src: url, alt, onLoad: () => URL.revokeObjectURL(url) }));
    });
    return place;
  }

  /** The same element for each call, without a description: for lists that change. */
  once(whose) {
    const name = JSON.stringify(whose);
    if (!this.#places.has(name)) this.#places.set(name, this.of(whose, ""));
    return this.#places.get(name);
  }

  /** A function that loads a crop with all of its batch: a Blob, or null if none is stored. */
  #load(whose) {
    const name = JSON.stringify(whose);
    if (!this.#loads.has(name)) {
      if (!this.#batch || this.#batch.wanted.length === AT_ONCE) this.#batch = { wanted: [], loaded: null };
      const batch = this.#batch;
      const at = batch.wanted.push(whose) - 1;
      this.#loads.set(name, async () => {
        if (this.#batch === batch) this.#batch = null;
        batch.loaded ??= call("POST", `${galleryPath(this.#gallery)}/crops`, {
          json: { crops: batch.wanted },
          signal: this.#signal,
        });
        try {
          return opened((await batch.loaded).data[at].image);
        } catch (error) {
          batch.loaded = null; // the next picture that comes into view asks again
          throw error;
        }
      });
    }
    return this.#loads.get(name);
  }
}

const opened = (image) =>
  image && new Blob([Uint8Array.from(atob(image), (one) => one.charCodeAt(0))], { type: "image/webp" });

/** Run `act` when `place` comes into view, unless the page was left: then `signal` is aborted. */
export function whenVisible(place, signal, act) {
  const watch = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watch.disconnect();
    act();
  });
  watch.observe(place);
  signal?.addEventListener("abort", () => watch.disconnect(), { once: true });
}

/** Faces side by side. `faces`: pairs of caption and picture. */
export const sides = (faces) =>
  each("div.sides", faces, ([caption, face]) => h("figure", [face, h("figcaption.hint", caption)]));

/** A hint how to store pictures in a gallery that stores none. */
export const keepHint = (gallery) =>
  h("p.hint", [
    `“${gallery}” stores no pictures to compare. For new photos, turn on “Keep a small picture of each enrolled face” in its `,
    h("a", { href: galleryPage(gallery, "/settings") }, "settings"),
    ".",
  ]);
