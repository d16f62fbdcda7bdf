import { h } from "../dom.js";
import { heading } from "../ui.js";

export const title = () => "Compare";

export function render(params, signal) {
  return h("div", { class: "page" }, heading("Compare", "Whether two photos show one person."));
}
