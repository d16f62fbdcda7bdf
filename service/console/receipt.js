// The receipt of a deletion.

import { call } from "./api.js";
import { careful } from "./dialogs.js";
import { fill, h, icon } from "./dom.js";
import { counted, when } from "./numbers.js";
import { copyButton, facts, heading, linkButton, toast } from "./ui.js";

// Labels in display order.
const KINDS = { subjects: ["person", "people"], templates: ["photo"] };

/** Show a receipt of the API. */
export function receipt(document, title) {
  const went = Object.entries(KINDS)
    .filter(([kind]) => document.removed[kind] > 0)
    .map(([kind, names]) => counted(document.removed[kind], ...names));
  const copy = copyButton("Copy the receipt", JSON.stringify(document, null, 2));
  return h("section.card.receipt", { role: "status" }, [
    h("h2", [icon("check"), title]),
    went.length > 0 && h("p", `Erased: ${went.join(", ")}.`),
    facts([
      ["Receipt", h("code", document.id)],
      ["Time", when(document.at)],
    ]),
    h("p.hint", "“kith erasures list” lists all receipts of a gallery."),
    copy && h("div.actions", copy),
  ]);
}

/** The receipt of a deletion in a short message. */
export const briefly = ({ receipt: { id } }) => `Receipt ${id.slice(0, 8)}….`;

/**
 * A red button that deletes what `page` is about, and then shows the receipt and a link `back`: its text and address. `what`: the
 * kind of thing, `has`: its content in words, `after()`: called when it is deleted.
 */
export function eraser(page, what, name, path, { has, typed, back, after, signal }) {
  const text = `${has} are deleted. This cannot be undone. A receipt lists the deleted data.`;
  const remove = async () => {
    const answer = await call("DELETE", path);
    after();
    if (signal.aborted) return toast(`${name} is deleted. Receipt ${answer.receipt.id}.`);
    const on = linkButton(...back, { kind: "primary" });
    fill(page(), heading(name), receipt(answer.receipt, `${name} is deleted.`), h("div.actions", on));
    on.focus(); // the clicked button was removed
  };
  return careful(`Delete the ${what}`, () => [`Delete ${name}?`, text, "Delete", { typed }], remove, { icon: "trash" });
}
