// The receipt of a deletion.

import { h, icon } from "./dom.js";
import { counted, when } from "./numbers.js";
import { button, facts, toast } from "./ui.js";

// Labels in display order.
const KINDS = { subjects: ["person", "people"], templates: ["photo"] };

/** Show a receipt of the API. */
export function receipt(document, title) {
  const went = Object.entries(KINDS)
    .filter(([kind]) => document.removed[kind] > 0)
    .map(([kind, names]) => counted(document.removed[kind], ...names));
  const copy = async () => {
    await navigator.clipboard.writeText(JSON.stringify(document, null, 2));
    toast("The receipt is copied.");
  };
  return h("section.card.receipt", { role: "status" }, [
    h("h2", [icon("check"), title]),
    went.length > 0 && h("p", `Erased: ${went.join(", ")}.`),
    facts([
      ["Receipt", h("code", document.id)],
      ["Time", when(document.at)],
    ]),
    h("p.hint", "“kith erasures list” lists all receipts of a gallery."),
    navigator.clipboard && h("div.actions", button("Copy the receipt", copy, { icon: "paste" })),
  ]);
}
