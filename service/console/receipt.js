// The receipt of a deletion.

import { fill, h, icon } from "./dom.js";
import { counted, when } from "./numbers.js";
import { button, facts, heading, linkButton, toast } from "./ui.js";

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

/** The receipt of a deletion in a short message. */
export const briefly = ({ receipt: { id } }) => `Receipt ${id.slice(0, 8)}….`;

/** Show the receipt of what a page was about, and a link `back`: its text and address. */
export function pageDeleted(page, name, answer, title, back, signal) {
  if (signal.aborted) return toast(`${name} is deleted. Receipt ${answer.receipt.id}.`);
  const on = linkButton(...back, { kind: "primary" });
  fill(page, heading(name), receipt(answer.receipt, title), h("div.actions", on));
  on.focus(); // the clicked button was removed
}
