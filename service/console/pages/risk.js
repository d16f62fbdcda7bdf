import { h } from "../dom.js";
import { heading } from "../ui.js";

export const title = () => "Risk";

export function render(params, signal) {
  return h("div", { class: "page" }, heading("Risk", "Which threshold keeps which risk."));
}
