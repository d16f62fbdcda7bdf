import { h } from "../dom.js";
import { heading } from "../ui.js";

export const title = () => "Hygiene";

export function render(params, signal) {
  return h("div", { class: "page" }, heading("Hygiene", "People enrolled twice, photos of somebody else, lookalikes."));
}
