import { h } from "../dom.js";
import { heading } from "../ui.js";

export const title = () => "Gallery";

export function render(params, signal) {
  return h("div", { class: "page" }, heading("Gallery", "Its people, and what it accepts."));
}
