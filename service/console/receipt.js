// What a deletion is answered with: what went, and by what it can be proved.

import { h, icon } from "./dom.js";
import { counted, when } from "./numbers.js";
import { button, toast } from "./ui.js";

// In this order; what else the service counts is told as it calls it.
const KINDS = {
  subjects: ["person", "people"],
  templates: ["photo"],
  crops: ["kept picture"],
  vectors: ["set of numbers of a face", "sets of numbers of faces"],
  answers: ["remembered answer"],
  job_items: ["line of jobs", "lines of jobs"],
};

/** `document`: the API's receipt. Keep it: it is the proof. */
export function receipt(document, title) {
  const kinds = new Set([...Object.keys(KINDS), ...Object.keys(document.removed)]);
  const went = [...kinds]
    .filter((kind) => document.removed[kind] > 0)
    .map((kind) => (KINDS[kind] ? counted(document.removed[kind], ...KINDS[kind]) : `${document.removed[kind]} ${kind}`));
  const copy = async () => {
    await navigator.clipboard.writeText(JSON.stringify(document, null, 2));
    toast("The receipt is copied.");
  };
  return h(
    "section",
    { class: "card receipt", role: "status" },
    h("h2", {}, icon("check"), title),
    h("p", {}, went.length ? `Erased: ${went.join(", ")}.` : "There was nothing to erase besides the name."),
    h(
      "dl",
      { class: "facts one" },
      [["Receipt", h("code", {}, document.id)], ["At", when(document.at)], ["Line of the audit", String(document.line)], ["Its hash", h("code", {}, document.hash)]].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    ),
    h("p", { class: "hint" }, "Keep it, if you may have to show that this was done. “kith erasures verify” tells whether a receipt holds."),
    navigator.clipboard && h("div", { class: "actions" }, button("Copy the receipt", copy, { icon: "paste" })),
  );
}
