import { call, galleryPath } from "../api.js";
import { Aside } from "../aside.js";
import { fill, h } from "../dom.js";
import { download } from "../files.js";
import { galleryForm } from "../gallery_form.js";
import { counted, when, whole } from "../numbers.js";
import { galleryHeading } from "../reports.js";
import { receipt } from "../receipt.js";
import { button, confirmed, facts, heading, linkButton, loading, problemBox, toast } from "../ui.js";
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
  const wrong = h("div");
  const go = h("button.button.primary", { type: "submit" }, "Save");
  const save = async (event) => {
    event.preventDefault();
    const changed = form.read();
    if (Object.keys(changed).length === 0) return toast("Nothing was changed.");
    go.disabled = true;
    try {
      const change = (query) => call("PATCH", galleryPath(gallery), { json: changed, query, signal });
      const now = await change().catch(async (error) => {
        if (error.code !== "retention_unconfirmed") throw error;
        if (!(await confirmed("Delete old photos?", `${problem(error).text} This cannot be undone.`, "Delete")))
          throw error;
        return change({ confirm: error.document.confirm });
      });
      toast("Saved. Searches now use these settings.");
      fill(place, ...parts(gallery, now, place, signal));
    } catch (error) {
      fill(wrong, problemBox(error));
      go.disabled = false;
    }
  };
  return [
    h("form.card.stack", { onSubmit: save }, [form.elements, wrong, h("div.actions", go)]),
    h("div.stack", [about(gallery, found), files(gallery, found, signal), removal(gallery, found, place, signal)]),
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

function files(gallery, found, signal) {
  const save = () => download(`${galleryPath(gallery)}/export`, `${gallery}.ndjson`, { signal });
  return h("section.card", [
    h("h2", "Export"),
    h(
      "p",
      "A file of all people with their embeddings, for another Kith or as an archive. It is not encrypted: protect it like the photos.",
    ),
    h("div.actions", button("Export", save, { icon: "upload" })),
    h(
      "p.hint",
      `It needs a key with the scope “admin”. “kith gallery import” reads the file${found.template_count > 100_000 ? "; for a gallery as large as this one use “kith gallery export”" : ""}.`,
    ),
  ]);
}

function removal(gallery, found, place, signal) {
  const remove = button(
    "Delete the gallery",
    async () => {
      const sure = await confirmed(
        `Delete “${gallery}”?`,
        `${counted(found.subject_count, "person", "people")} and ${counted(found.template_count, "photo")} are deleted. This cannot be undone. A receipt lists the deleted data.`,
        "Delete",
        { typed: gallery },
      );
      if (!sure) return;
      const gone = await call("DELETE", galleryPath(gallery));
      new Aside(gallery).clear();
      if (signal.aborted) return toast(`“${gallery}” is deleted. Receipt ${gone.receipt.id}.`);
      const on = linkButton("Back to galleries", "#/galleries", { kind: "primary" });
      fill(
        place.closest(".page"),
        heading(gallery),
        receipt(gone.receipt, `“${gallery}” is deleted`),
        h("div.actions", on),
      );
      on.focus(); // the clicked button was removed
    },
    { kind: "danger", icon: "trash" },
  );
  return h("section.card", [
    h("h2", "Delete"),
    h("p", "Deletes the gallery and erases all data of its people. This cannot be undone."),
    h("div.actions", remove),
  ]);
}
