import { h } from "../dom.js";
import { heading } from "../ui.js";

export const title = () => "Health";

export function render(params, signal) {
  return h("div", { class: "page" }, heading("Health", "What runs, on which device, and whether it is well."));
}
