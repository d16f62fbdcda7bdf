import { h } from "../dom.js";
import { heading } from "../ui.js";

export const title = () => "Enrol";

export function render(params, signal) {
  return h("div", { class: "page" }, heading("Enrol", "Add a person, or photos of one."));
}
