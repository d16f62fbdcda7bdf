import { call, galleryPath } from "../api.js";
import { Aside } from "../aside.js";
import { confirmed } from "../dialogs.js";
import { fill, h } from "../dom.js";
import { download } from "../files.js";
import { galleryForm } from "../gallery_form.js";
import { counted, when, whole } from "../numbers.js";
import { galleryHeading } from "../reports.js";
import { eraser } from "../receipt.js";
import { saveForm } from "../forms.js";
import { button, facts, loading, toast } from "../ui.js";
import { problem } from "../words.js";

export const title = ({ gallery }) => `Settings of ${gallery}`;

export function render({ gallery }, signal) {
  return h("div.page", [
    galleryHeading(gallery, "settings", "Risk, storage, retention and search of this gallery."),
    loading(async () => {
      const place = h("div.columns");
      fill(place, ...parts(gallery, await call("GET", galleryPath(gallery), { signal }), place, signal));
      return place;
    }),
  ]);
}

function parts(gallery, found, place, signal) {
  const form = galleryForm(found);
  const save = async (json) => {
    const change = (query) => call("PATCH", galleryPath(gallery), { json, query, signal });
    const now = await change().catch(async (error) => {
      if (error.code !== "retention_unconfirmed") throw error;
      if (!(await confirmed("Delete old photos?", `${problem(error).text} This cannot be undone.`, "Delete")))
        throw error;
      return change({ confirm: error.document.confirm });
    });
    toast("Saved. Searches now use these settings.");
    fill(place, ...parts(gallery, now, place, signal));
  };
  return [
    saveForm(form.elements, form.read, save),
    h("div.stack", [about(gallery, found), files(gallery, signal), removal(gallery, found, place, signal)]),
  ];
}

const about = (gallery, found) =>
  h("section.card", [
    h("h2", "Properties"),
    facts([
      ["Created", when(found.created_at)],
      ["Recognizer", found.recognizer.slice(0, 12)],
      ["Embedding dimensions", whole(found.dimension)],
    ]),
    h("p.hint", "“kith gallery migrate” changes the recognizer while searches go on."),
  ]);

function files(gallery, signal) {
  const save = () => download(`${galleryPath(gallery)}/export`, `${gallery}.ndjson`, { signal });
  return h("section.card", [
    h("h2", "Export"),
    h("p", "A file of all people with their embeddings. It is not encrypted: protect it like the photos."),
    h("div.actions", button("Export", save, { icon: "upload" })),
    h(
      "p.hint",
      "It needs a key with the scope “admin”. “kith gallery import” reads the file; “kith gallery export” suits large galleries.",
    ),
  ]);
}

function removal(gallery, found, place, signal) {
  const button = eraser(() => place.closest(".page"), "gallery", `“${gallery}”`, galleryPath(gallery), {
    has: `${counted(found.subject_count, "person", "people")} and ${counted(found.template_count, "photo")}`,
    typed: gallery,
    back: ["Back to galleries", "#/galleries"],
    after: () => new Aside(gallery).clear(),
    signal,
  });
  return h("section.card", [
    h("h2", "Delete"),
    h("p", "Deletes the gallery and erases all data of its people. This cannot be undone."),
    h("div.actions", button),
  ]);
}
