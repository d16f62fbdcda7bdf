// The receipt of a deletion.

import { h, icon } from "./dom.js";
import { counted, when } from "./numbers.js";
import { button, facts, toast } from "./ui.js";

// Labels in display order. Other kinds keep the name of the service.
const KINDS = {
  subjects: ["person", "people"],
  templates: ["photo"],
  decoys: ["corrected mistake"],
  strangers: ["stranger"],
  stranger_templates: ["photo of a stranger", "photos of strangers"],
  albums: ["album"],
  album_faces: ["face of an album", "faces of albums"],
};

/** Show a receipt of the API. */
export function receipt(document, title) {
  const kinds = new Set([...Object.keys(KINDS), ...Object.keys(document.removed)]);
  const went = [...kinds]
    .filter((kind) => document.removed[kind] > 0)
    .map((kind) =>
      KINDS[kind] ? counted(document.removed[kind], ...KINDS[kind]) : `${document.removed[kind]} ${kind}`,
    );
  const copy = async () => {
    await navigator.clipboard.writeText(JSON.stringify(document, null, 2));
    toast("The receipt is copied.");
  };
  return h("section.card.receipt", { role: "status" }, [
    h("h2", [icon("check"), title]),
    h("p", went.length ? `Erased: ${went.join(", ")}.` : "Only the name was erased."),
    facts([
      ["Receipt", h("code", document.id)],
      ["Time", when(document.at)],
    ]),
    h("p.hint", "“kith erasures list” lists all receipts of a gallery."),
    navigator.clipboard && h("div.actions", button("Copy the receipt", copy, { icon: "paste" })),
  ]);
}
