import { call, galleryPath } from "../api.js";
import { fill, h } from "../dom.js";
import { download } from "../files.js";
import { galleryForm } from "../gallery_form.js";
import { galleryHeading } from "../reports.js";
import { receipt } from "../receipt.js";
import { button, confirmed, heading, linkButton, loading, problemBox, tell, toast } from "../ui.js";
import * as words from "../words.js";

export const title = ({ gallery }) => `Settings of ${gallery}`;

export function render({ gallery }, signal) {
  return h(
    "div",
    { class: "page" },
    galleryHeading(gallery, "settings", "What it accepts, keeps and forgets."),
    loading(async () => {
      const place = h("div", { class: "columns" });
      fill(place, ...parts(gallery, await call("GET", galleryPath(gallery), { signal }), place, signal));
      return place;
    }),
  );
}

function parts(gallery, found, place, signal) {
  const form = galleryForm(found);
  const wrong = h("div", {});
  const go = h("button", { type: "submit", class: "button primary" }, "Save");
  const save = async (event) => {
    event.preventDefault();
    const changed = form.read();
    if (Object.keys(changed).length === 0) return toast("Nothing was changed.");
    go.disabled = true;
    try {
      const now = await call("PATCH", galleryPath(gallery), { json: changed, signal });
      toast("Saved. Searches go by it from now on.");
      fill(place, ...parts(gallery, now, place, signal));
    } catch (error) {
      fill(wrong, problemBox(error));
      go.disabled = false;
    }
  };
  return [
    h("form", { class: "card stack", onSubmit: save }, form.elements, wrong, h("div", { class: "actions" }, go)),
    h("div", { class: "stack" }, about(found), files(gallery, found, signal), removal(gallery, found, place, signal)),
  ];
}

const about = (found) =>
  h(
    "section",
    { class: "card" },
    h("h2", {}, "About it"),
    h(
      "dl",
      { class: "facts" },
      [
        ["People", words.count(found.subjects)],
        ["Photos", words.count(found.templates)],
        ["Made", words.when(found.created_at)],
        ["Recogniser", found.recogniser.slice(0, 12)],
        ["Numbers of a face", words.count(found.dimension)],
      ].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    ),
  );

function files(gallery, found, signal) {
  const many = found.templates > 100_000;
  const take = h("input", { type: "file", accept: ".ndjson,.jsonl,.parquet", hidden: true });
  take.addEventListener("change", async () => {
    const [file] = take.files;
    take.value = "";
    if (!file) return;
    try {
      const type = file.name.endsWith(".parquet") ? "application/vnd.apache.parquet" : "application/x-ndjson";
      const report = await call("POST", `${galleryPath(gallery)}/import`, { body: file, type, signal });
      toast(`Taken: ${words.plural(report.subjects, "person", "people")}, ${words.plural(report.templates, "photo")}; ${report.present} were there, ${report.refused} refused.`, report.refused ? "error" : "ok");
    } catch (error) {
      tell(error);
    }
  });
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "In and out"),
    h("p", {}, "A file of everybody with what recognises their faces, for another Kith or for keeping. It is not encrypted: treat it as you would the photos."),
    many && h("p", { class: "hint" }, "This gallery is large: the browser holds the file in memory. “kith gallery export” does not."),
    h(
      "div",
      { class: "actions" },
      button("Export", () => download(`${galleryPath(gallery)}/export`, `${gallery}.ndjson`, { query: { format: "ndjson" }, signal }), { icon: "upload" }),
      button("Import", () => take.click()),
      take,
    ),
    h("p", { class: "hint" }, "Both need a key with the right “admin”."),
  );
}

function removal(gallery, found, place, signal) {
  const remove = button(
    "Delete the gallery",
    async () => {
      const sure = await confirmed({
        title: `Delete “${gallery}”?`,
        text: `${words.plural(found.subjects, "person", "people")} and ${words.plural(found.templates, "photo")} go for good. A receipt tells what went.`,
        yes: "Delete it for good",
        typed: gallery,
      });
      if (!sure) return;
      const gone = await call("DELETE", galleryPath(gallery));
      if (signal.aborted) return toast(`“${gallery}” is deleted. Receipt ${gone.receipt.id}.`);
      const on = linkButton("To the galleries", "#/galleries", { kind: "primary" });
      fill(place.closest(".page"), heading(gallery), receipt(gone.receipt, `“${gallery}” is deleted`), h("div", { class: "actions" }, on));
      on.focus(); // the button pressed went with the page
    },
    { kind: "danger", icon: "trash" },
  );
  return h("section", { class: "card" }, h("h2", {}, "Delete"), h("p", {}, "The gallery with everybody in it. What is stored of them is erased, and nobody can bring it back."), h("div", { class: "actions" }, remove));
}
